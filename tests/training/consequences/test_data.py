"""What reaches the model has the shares and lengths of the configuration."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loopwm.records.errors import InputError
from loopwm.text.data.data_loader import LoaderState, PlannedRow, SourcePosition
from loopwm.text.data.tree import IGNORED, QUERY_HORIZON
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.program import TextProgram
from tests.fixtures.shards import toy_episode, write_toy_shards
from tests.training.consequences.watched import (
    program_of,
    rows_seen,
    shows,
)


def plans_seen(program: TextProgram, steps: int = 25) -> list[PlannedRow]:
    return [planned for rows, _ in islice(program.train_stream.steps(LoaderState()), steps) for planned in rows]


def target_shares(pairs: Iterator[tuple[Any, int]]) -> dict[Any, float]:
    """Of keys with counts."""
    counts: Counter = Counter()
    for key, count in pairs:
        counts[key] += count
    return {key: count / counts.total() for key, count in counts.items()}


@shows("data.regimes")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_snapshots_have_their_share_of_the_targets_that_reach_the_model(config_file, share):
    program = program_of(config_file, f"data.regimes={{observed: {1 - share}, snapshot: {share}}}")
    look = load_tokenizer().convert_tokens_to_ids("<|look|>")
    found = target_shares(
        (bool((batch.tokens[row] == look).any()), int((batch.label[row] != IGNORED).sum()))
        for batch, row in rows_seen(program)
    )
    assert found.get(True, 0.0) == pytest.approx(share, abs=0.05)


def queries_of(planned: PlannedRow) -> list[int]:
    """Return the steps whose state the queries of a row ask for."""
    return [b.step + b.deepest - 1 for b in planned.plan.branches if b.query is not None]


@shows("data.query_share")
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_state_queries_have_their_share_of_targets(config_file, share):
    plans = plans_seen(program_of(config_file, f"data.query_share={share}", "data.max_queries=8"))
    horizons = Counter(
        horizon
        for planned in plans
        for horizon, label in zip(planned.row.horizon, planned.row.label, strict=True)
        if label != IGNORED
    )
    assert horizons[QUERY_HORIZON] / horizons.total() == pytest.approx(share, abs=0.05)


@shows("data.max_queries")
@pytest.mark.parametrize("most", [1, 3])
def test_rows_have_at_most_max_queries(config_file, most):
    plans = plans_seen(program_of(config_file, "data.query_share=0.9", f"data.max_queries={most}"))
    assert max(len(queries_of(planned)) for planned in plans) == most


@shows("data.change_weight")
def test_change_weight_prefers_changed_answers(config_file):
    changed = {}
    for weight in (1.0, 1000.0):
        keys = ["data.query_share=0.5", "data.max_queries=1", f"data.change_weight={weight}"]
        asked = [
            (planned.episode, branch.step + branch.deepest - 1, branch.query)
            for planned in plans_seen(program_of(config_file, *keys))
            for branch in planned.plan.branches
            if branch.query is not None
        ]
        changed[weight] = sum(
            episode.queries_at(step)[query][1].tolist() != episode.queries_at(step - 1)[query][1].tolist()
            for episode, step, query in asked
            if step > 0
        ) / len(asked)
    assert changed[1000.0] > changed[1.0]


@shows("data.trunk_tokens_max")
@pytest.mark.parametrize("limit", [90, 130])
def test_no_trunk_is_longer_than_its_limit(config_file, limit):
    data = [f"data.trunk_tokens_max={limit}", "data.trunk_tokens_min=64"]
    trunks = [int((batch.branch[row] == 0).sum()) for batch, row in rows_seen(program_of(config_file, *data))]
    assert 0.8 * limit < max(trunks) <= limit


@shows("data.trunk_tokens_min")
def test_trunks_are_cut_no_shorter_than_their_least_length_asks(config_file):
    """With equal limits every window takes what it can: episodes fall into fewer, longer rows."""
    trunks = {}
    for least in (64, 200):
        data = [f"data.trunk_tokens_min={least}", "data.trunk_tokens_max=200", "data.regimes={observed: 1}"]
        trunks[least] = [row.row.branch.count(0) for row in plans_seen(program_of(config_file, *data))]
    assert sum(trunks[200]) / len(trunks[200]) > 1.2 * sum(trunks[64]) / len(trunks[64])


@shows("data.history_share")
def test_history_before_the_first_target_takes_its_share_at_most(config_file):
    shown = {}
    for share in (0.0, 0.6):
        data = [f"data.history_share={share}", "data.regimes={observed: 1}", "data.trunk_tokens_max=150"]
        plans = [row.plan for row in plans_seen(program_of(config_file, *data))]
        shown[share] = [plan.targets_from - plan.first for plan in plans if plan.targets_from > 1]
    assert set(shown[0.0]) == {1}  # the step before always stays
    assert max(shown[0.6]) > 2


@shows("data.snapshot_steps")
@pytest.mark.parametrize("most", [1, 3])
def test_snapshots_are_followed_by_so_many_steps_at_most(config_file, most):
    program = program_of(config_file, f"data.snapshot_steps={most}", "data.trunk_tokens_min=256")
    lengths = {row.plan.last - row.plan.first + 1 for row in plans_seen(program) if row.plan.context_kind == "snapshot"}
    assert max(lengths) == most


@shows("data.horizon_shares")
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.6, 0.2, 0.2)])
def test_horizons_have_their_shares_of_the_targets_that_reach_the_model(config_file, shares):
    program = program_of(config_file, f"data.horizon_shares={list(shares)}")
    found = target_shares(
        (max(horizon, 1), 1)
        for batch, row in rows_seen(program)
        for horizon in batch.horizon[row][batch.label[row] != IGNORED].tolist()
    )
    assert found == pytest.approx(dict(enumerate(shares, start=1)), abs=0.05)


@shows("data.max_branches")
@pytest.mark.parametrize("most", [0, 2])
def test_rows_have_so_many_branches_at_most(config_file, most):
    program = program_of(config_file, f"data.max_branches={most}")
    assert max(int(batch.branch[row].max()) for batch, row in rows_seen(program)) == most


@shows("data.echo_weights")
def test_branches_leave_where_the_same_is_told_twice_as_often_as_their_world_says(config_file):
    echoes = {}
    for weight in (1.0, 100.0):
        weights = f"data.echo_weights={{scienceworld: {weight}}}"
        data = [weights, "data.max_branches=1", "data.horizon_shares=[0.5, 0.5]"]
        found = []
        for row in plans_seen(program_of(config_file, *data), 30):
            for branch in row.plan.branches:
                one, two = (row.episode.observations[branch.step + k] for k in (1, 2))
                found.append(list(one) == list(two))
        echoes[weight] = sum(found) / len(found)
    assert echoes[100.0] > echoes[1.0]
    with pytest.raises(InputError, match=r"data\.echo_weights\.alfred: must have an episode in data\.train"):
        program_of(config_file, "data.echo_weights={alfred: 2.0}")


@shows("data.repeat_weight")
def test_branches_leave_more_often_before_repeated_actions_the_more_these_weigh(config_file):
    before_repeats = {}
    for weight in (1.0, 100.0):
        # One branch a row, so that there is something to choose.
        data = [f"data.repeat_weight={weight}", "data.max_branches=1", "data.horizon_shares=[0.5, 0.5]"]
        rows = plans_seen(program_of(config_file, *data), 40)
        repeats = [
            row.episode.actions[b.step + 1].tolist() == row.episode.actions[b.step + 2].tolist()
            for row in rows
            for b in row.plan.branches
        ]
        before_repeats[weight] = sum(repeats) / len(repeats)
    assert before_repeats[100.0] > before_repeats[1.0] + 0.2


@pytest.fixture(scope="module")
def mixed_shards(tmp_path_factory) -> Path:
    """Two worlds, and two policies in each, in equal parts."""
    out = tmp_path_factory.mktemp("mixed")
    kinds = [(env, policy) for env in ("scienceworld", "alfworld") for policy in ("random", "gold")]
    episodes = (dataclasses.replace(toy_episode(i), env=env, policy=policy) for env, policy in kinds for i in range(12))
    write_toy_shards(out, episodes)
    return out


@shows("data.tasks")
def test_tasks_have_their_shares_of_the_targets(config_file, tmp_path):
    episodes = (dataclasses.replace(toy_episode(i), task=("boil", "melt", "grow")[i % 3]) for i in range(24))
    write_toy_shards(tmp_path / "shards", episodes)
    keys = [f"data.train=[{tmp_path / 'shards'}]", "data.dev=[]"]
    rows = plans_seen(program_of(config_file, *keys, "data.tasks={scienceworld: {boil: 0.8, melt: 0.2}}"), 40)
    found = target_shares((row.episode.task, row.row.targets) for row in rows)
    assert found == pytest.approx({"boil": 0.8, "melt": 0.2}, abs=0.04)
    with pytest.raises(InputError, match=r"data\.tasks\.scienceworld\.bake: must have an episode in data\.train"):
        program_of(config_file, *keys, "data.tasks={scienceworld: {boil: 0.5, bake: 0.5}}")


@shows("data.episode_steps")
def test_an_epoch_takes_so_many_steps_of_a_long_episode(config_file):
    windows = ["data.trunk_tokens_min=64", "data.trunk_tokens_max=128"]
    whole, short = (
        list(program_of(config_file, *windows, f"data.episode_steps={steps}").train_stream.sources[0].epoch(0))
        for steps in (0, 1)
    )
    assert len(short) < len(whole)
    assert len({episode for episode, _ in whole}) == len(short)


@shows("data.folder_weights")
def test_folder_weights_are_how_often_an_epoch_takes_episodes(config_file, shards, tmp_path):
    write_toy_shards(tmp_path / "more", map(toy_episode, range(50, 70)))
    folders = f"data.train=[{shards}, {tmp_path / 'more'}]"

    def taken(weight: float, epochs: int = 1) -> tuple[Counter[int], Counter[int]]:
        program = program_of(config_file, folders, f"data.folder_weights={{{tmp_path / 'more'}: {weight}}}")
        (source,) = program.train_stream.sources
        plans = [(index, plan) for epoch in range(epochs) for index, plan in source.epoch(epoch)]
        whole: Counter[int] = Counter()
        for index, plan in plans:
            whole[index] += plan.last - plan.targets_from + 1
        times = {i: whole[i] // source.planner.episodes[i].episode.last_step for i in range(60)}
        return Counter(times[i] for i in range(40)), Counter(times[i] for i in range(40, 60))

    assert taken(1.0) == ({1: 40}, {1: 20})
    assert taken(3.0) == ({1: 40}, {3: 20})
    once, drawn = taken(0.5, epochs=50)
    assert once == {50: 40}
    assert sum(times * count for times, count in drawn.items()) == pytest.approx(500, abs=60)
    assert len(drawn) > 5


def test_folder_weights_below_one_pass_over_empty_epochs(config_file, tmp_path):
    write_toy_shards(tmp_path / "one", [toy_episode(1)])
    folder = tmp_path / "one"
    program = program_of(config_file, f"data.train=[{folder}]", f"data.folder_weights={{{folder}: 0.2}}", "data.dev=[]")
    (source,) = program.train_stream.sources
    place = SourcePosition()
    for _ in range(4):
        _, place = source.take(place)
    assert place.epoch > 8
    assert {any(source.epoch(number)) for number in range(place.epoch)} == {True, False}


@shows("data.envs", "data.policies")
def test_worlds_and_policies_have_their_shares_of_the_targets(config_file, mixed_shards):
    data = ["data.envs={scienceworld: 0.75, alfworld: 0.25}", "data.policies={random: 0.8, gold: 0.2}"]
    program = program_of(config_file, f"data.train=[{mixed_shards}]", *data)
    rows = plans_seen(program, 40)
    by_world = target_shares((row.episode.env, row.row.targets) for row in rows)
    by_policy = target_shares((row.episode.policy, row.row.targets) for row in rows)
    assert by_world == pytest.approx({"scienceworld": 0.75, "alfworld": 0.25}, abs=0.04)
    assert by_policy == pytest.approx({"random": 0.8, "gold": 0.2}, abs=0.04)
