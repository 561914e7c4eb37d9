"""The planner of rows: coverage, quotas, repetition, and what its statistics say."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest

from loopwm.records.errors import InputError
from loopwm.records.template import StateSlots
from loopwm.records.token_episode import HIDDEN, INVENTORY, LOOK, TokenEpisode
from loopwm.text.data import sampler
from loopwm.text.data.data_loader import (
    BatchStream,
    LoaderState,
    SourcePosition,
    make_sources,
    partition,
    source_shares,
)
from loopwm.text.data.sampler import EpochPlanner
from loopwm.text.data.tree import IGNORED, QUERY_HORIZON, RowBuilder, RowPlan, TemplateIds, trunk_and_branches
from loopwm.text.training.config import BatchConfig, DataConfig, ObjectiveConfig
from tests.fixtures.rows import episode_of_texts, texts_of

BUILDER = RowBuilder(TemplateIds(2, 5, 3, 4, 6, 7, 8, 1), StateSlots())
DATA = DataConfig(
    trunk_tokens_min=64,
    trunk_tokens_max=512,
    regimes={"observed": 0.4, "briefed": 0.2, "snapshot": 0.25, "full": 0.15},
)
RNG_SEED = 5


def made_up(number: int, env: str = "scienceworld", policy: str = "gold", task: str = "boil") -> TokenEpisode:
    """Texts of random lengths; every token of step i's observation says which step it is. Hidden states are known at
    the start and at every fourth step."""
    rng = np.random.default_rng(number)
    steps = range(int(rng.integers(2, 60)))

    def texts(low: int, high: int) -> list[np.ndarray]:
        return [np.full(int(rng.integers(low, high)), 10 + i) for i in steps]

    actions = [np.array([], dtype=int), *(np.array([int(rng.integers(10, 14))]) for _ in steps[1:])]
    hidden = [text if i % 4 == 0 else None for i, text in enumerate(texts(60, 120))]
    return episode_of_texts(
        goal=np.arange(20),
        observations=texts(2, 40),
        actions=actions,
        looks=texts(30, 60),
        inventories=texts(3, 9),
        hidden_states=hidden,
        rewards=[0.0] * len(steps),
        env=env,
        task=task,
        policy=policy,
    )


@pytest.fixture(scope="module")
def episodes() -> list[TokenEpisode]:
    return [made_up(i) for i in range(60)]


def planned(episodes, data=DATA):
    planner = EpochPlanner(episodes, data, ObjectiveConfig(), StateSlots(), True)
    return list(planner.plan(np.random.default_rng(RNG_SEED)))


def test_every_transition_is_a_target_of_a_trunk_exactly_once_an_epoch(episodes):
    """By the tokens of the rows themselves: each observation's targets say their step."""
    seen: Counter[tuple[int, int]] = Counter()
    for index, plan in planned(episodes):
        row = BUILDER.build(episodes[index], plan)
        labels = [x for x, b in zip(row.label, row.branch, strict=True) if b == 0 and x != IGNORED]
        ends = [i for i, label in enumerate(labels) if label == BUILDER.ids.end]
        for start, end in itertools.pairwise([-1, *ends]):
            step = labels[start + 1] - 10
            assert labels[start + 1 : end] == [10 + step] * len(episodes[index].observations[step])
            seen[index, step] += 1
    assert seen == {(i, step): 1 for i, e in enumerate(episodes) for step in range(1, e.last_step + 1)}


def test_a_row_that_begins_later_shows_the_step_before_and_heads_show_their_own_step(episodes):
    later = 0
    for index, plan in planned(episodes):
        start = plan.targets_from - 1
        if plan.context_kind in ("observed", "briefed"):
            assert plan.head == 0
            assert plan.first <= max(start, 1)
            later += start > 0
        else:
            assert (plan.head, plan.first) == (start, start + 1)
            assert plan.last - start <= DATA.snapshot_steps
        if plan.context_kind in ("briefed", "full"):
            assert episodes[index].text(HIDDEN, plan.head) is not None
        for branch in plan.branches:
            assert max(plan.head, plan.targets_from - 1) <= branch.step <= plan.last
            assert branch.step + branch.deepest <= episodes[index].last_step
    assert later > 50


def test_trunks_keep_their_limit_and_differ_in_length(episodes):
    trunks = [sum(b == 0 for b in BUILDER.build(episodes[i], plan).branch) for i, plan in planned(episodes)]
    assert max(trunks) <= DATA.trunk_tokens_max
    assert np.quantile(trunks, 0.9) > 2 * np.quantile(trunks, 0.1)


def shares(rows, kind) -> dict:
    counts: Counter = Counter()
    for episode, plan, row in rows:
        for horizon, label in zip(row.horizon, row.label, strict=True):
            if label != IGNORED:
                counts[kind(episode, plan, horizon)] += 1
    return {key: count / sum(counts.values()) for key, count in counts.items()}


def test_quotas_of_contexts_and_horizons_are_reached_within_two_points(episodes):
    rows = [(episodes[i], plan, BUILDER.build(episodes[i], plan)) for i, plan in planned(episodes)]
    by_context = shares(rows, lambda _, plan, __: plan.context_kind)
    assert by_context == pytest.approx(DATA.regimes, abs=0.02)
    by_horizon = shares(rows, lambda _, __, horizon: max(horizon, 1))
    assert by_horizon == pytest.approx(dict(enumerate(DATA.horizon_shares, start=1)), abs=0.02)


def with_queries(episode: TokenEpisode) -> TokenEpisode:
    """Return the episode with a state query a step, whose answer changes at every tenth step."""
    steps = range(episode.last_step + 1)
    return like(episode, list(episode.observations), [[([9], [step // 10] * 20)] for step in steps])


def like(episode: TokenEpisode, observations: list[np.ndarray], queries=()) -> TokenEpisode:
    return episode_of_texts(
        episode.goal,
        observations,
        list(episode.actions),
        texts_of(episode, LOOK),
        texts_of(episode, INVENTORY),
        texts_of(episode, HIDDEN),
        env=episode.env,
        queries=queries,
    )


def test_state_queries_reach_their_share_of_targets(episodes):
    data = replace(DATA, query_share=0.2, max_queries=8, change_weight=1.0)
    asked = [with_queries(episode) for episode in episodes]
    rows = [(asked[i], plan, BUILDER.build(asked[i], plan)) for i, plan in planned(asked, data)]
    assert shares(rows, lambda _, __, horizon: horizon == QUERY_HORIZON)[True] == pytest.approx(0.2, abs=0.02)
    branches = [(plan, branch) for _, plan, _ in rows for branch in plan.branches if branch.query is not None]
    assert {branch.deepest for _, branch in branches} == {1, 2, 3, 4, 5}
    for plan, branch in branches:
        assert plan.targets_from - 1 <= branch.step <= branch.step + branch.deepest - 1 <= plan.last
    weighted = [plan for _, plan in planned(asked, replace(data, change_weight=8.0))]
    assert changed_share(weighted) > 1.5 * changed_share([plan for _, plan, _ in rows])


def changed_share(plans: list[RowPlan]) -> float:
    """Return the share of the plans' state queries whose answer is not that of the step before."""
    asked = [branch.step + branch.deepest - 1 for plan in plans for branch in plan.branches if branch.query is not None]
    return float(np.mean([step % 10 == 0 and step > 0 for step in asked]))


def test_answers_of_several_steps_are_those_of_each(episodes):
    for episode in map(with_queries, episodes[:5]):
        for steps in (range(len(episode.steps)), range(1, 2)):
            assert episode.answers(steps) == [dict(episode.query_places(step)) for step in steps]


def test_rows_without_query_share_ask_nothing(episodes):
    asked = [with_queries(episode) for episode in episodes]
    assert planned(asked) == planned(episodes)


@pytest.mark.parametrize("supervise", ["terminal", "all"])
def test_quotas_of_contexts_count_no_trunk_that_is_not_supervised(episodes, supervise):
    planner = EpochPlanner(episodes, DATA, ObjectiveConfig(supervise=supervise), StateSlots(), True)
    plans = list(planner.plan(np.random.default_rng(RNG_SEED)))
    rows = [(episodes[i], plan, BUILDER.build(episodes[i], plan)) for i, plan in plans]
    assert shares(rows, lambda _, plan, __: plan.context_kind) == pytest.approx(DATA.regimes, abs=0.02)


def test_an_epoch_takes_the_same_windows_of_long_episodes_whatever_is_supervised(episodes):
    """Steps that a window shows again are none of its own, where it has no targets either."""
    data = replace(DATA, episode_steps=12, regimes={"observed": 1.0}, trunk_tokens_max=256)
    windows = []
    for supervise in ("every", "all", "terminal"):
        planner = EpochPlanner(episodes, data, ObjectiveConfig(supervise=supervise), StateSlots(), True)
        plans = list(planner.plan(np.random.default_rng(RNG_SEED)))
        windows.append([(index, plan.first, plan.last) for index, plan in plans])
    assert windows[0] == windows[1] == windows[2]


def test_quotas_of_worlds_and_policies_hold_whatever_the_shards_hold_of_each():
    groups = [("scienceworld", "gold", 40), ("scienceworld", "fork", 10), ("alfworld", "expert", 5)]
    many = [made_up(100 * g + i, env, policy) for g, (env, policy, n) in enumerate(groups) for i in range(n)]
    data = replace(
        DATA, envs={"scienceworld": 0.6, "alfworld": 0.4}, policies={"gold": 0.5, "fork": 0.5, "expert": 0.1}
    )  # fmt: skip
    sources = make_sources(many, data, ObjectiveConfig(), BUILDER, True, 0)
    stream = BatchStream(sources, BUILDER, BatchConfig(16, 2000, 4), 0, trunk_and_branches)
    rows = [row for step, _ in itertools.islice(stream.steps(LoaderState()), 40) for row in step]
    found = shares([(r.episode, r.plan, r.row) for r in rows], lambda e, _, __: (e.env, e.policy))
    wanted = {("scienceworld", "gold"): 0.3, ("scienceworld", "fork"): 0.3, ("alfworld", "expert"): 0.4}
    assert found == pytest.approx(wanted, abs=0.02)
    with pytest.raises(InputError, match="must have a share for 'fork'"):
        make_sources(many, replace(data, policies={"gold": 1.0, "expert": 1.0}), ObjectiveConfig(), BUILDER, True, 0)


def test_a_policy_without_a_task_that_has_a_share_takes_nothing_from_its_world():
    targets = {("scienceworld", "gold", "boil"): 9, ("scienceworld", "fork", "melt"): 9, ("alfworld", "gold", ""): 9}
    data = replace(DATA, envs={"scienceworld": 0.8, "alfworld": 0.2}, policies={"gold": 0.5, "fork": 0.5})
    found = source_shares(targets, replace(data, tasks={"scienceworld": {"boil": 1.0}}))
    assert found == pytest.approx(dict(zip(targets, (0.8, 0.0, 0.2), strict=True)))


@pytest.mark.parametrize(("trunk_is_served", "nearest"), [(True, 2), (False, 1)])
def test_horizon_1_is_decoded_in_branches_where_trunks_are_not_what_is_served(episodes, trunk_is_served, nearest):
    planner = EpochPlanner(episodes, DATA, ObjectiveConfig(), StateSlots(), trunk_is_served)
    plans = list(planner.plan(np.random.default_rng(RNG_SEED)))
    assert min(k for _, plan in plans for branch in plan.branches for k in branch.decoded) == nearest


def test_quotas_of_tasks_hold_within_each_policy_and_a_task_without_one_is_left_out():
    groups = [("boil", "gold", 20), ("melt", "gold", 3), ("melt", "fork", 6), ("grow", "fork", 6), ("find", "gold", 9)]
    many = [made_up(100 * g + i, "scienceworld", p, t) for g, (t, p, n) in enumerate(groups) for i in range(n)]
    many += [made_up(900 + i, "alfworld", "gold", "pick") for i in range(5)]
    tasks = {"scienceworld": {"boil": 0.5, "melt": 0.3, "grow": 0.2}}
    data = replace(DATA, envs={"scienceworld": 0.8, "alfworld": 0.2}, policies={"gold": 0.5, "fork": 0.5}, tasks=tasks)
    sources = make_sources(many, data, ObjectiveConfig(), BUILDER, True, 0)
    stream = BatchStream(sources, BUILDER, BatchConfig(16, 2000, 4), 0, trunk_and_branches)
    rows = [row for step, _ in itertools.islice(stream.steps(LoaderState()), 80) for row in step]
    found = shares([(r.episode, r.plan, r.row) for r in rows], lambda e, _, __: (e.policy, e.task))
    wanted = {("gold", "boil"): 0.25, ("gold", "melt"): 0.15, ("fork", "melt"): 0.24, ("fork", "grow"): 0.16}
    assert found == pytest.approx(wanted | {("gold", "pick"): 0.2}, abs=0.02)


def test_long_episodes_give_so_many_steps_an_epoch_and_all_of_them_in_time(episodes):
    data = replace(DATA, episode_steps=12, trunk_tokens_max=256)
    planner = EpochPlanner(episodes, data, ObjectiveConfig(), StateSlots(), True)
    seen: Counter[tuple[int, int]] = Counter()
    for epoch in range(30):
        given: Counter[int] = Counter()
        longest: Counter[int] = Counter()
        for index, plan in planner.plan(np.random.default_rng(epoch)):
            steps = range(plan.targets_from, plan.last + 1)
            given[index] += len(steps)
            longest[index] = max(longest[index], len(steps))
            seen.update((index, step) for step in steps)
        for index, episode in enumerate(episodes):
            assert min(12, episode.last_step) <= given[index] < max(12 + longest[index], episode.last_step + 1)
            assert given[index] == episode.last_step or given[index] - longest[index] < 12
    assert seen.keys() == {(i, step) for i, e in enumerate(episodes) for step in range(1, e.last_step + 1)}


def test_each_source_goes_through_whole_epochs_of_its_own():
    many = [made_up(i) for i in range(8)] + [made_up(50 + i, policy="fork") for i in range(2)]
    sources = make_sources(many, replace(DATA, policies={"gold": 1, "fork": 1}), ObjectiveConfig(), BUILDER, True, 0)
    stream = BatchStream(sources, BUILDER, BatchConfig(4, 500, 2), 0, trunk_and_branches)
    seen: Counter[tuple[int, int]] = Counter()
    for rows, loader_state in stream.steps(LoaderState()):
        for row in rows:
            number = next(i for i, episode in enumerate(many) if episode is row.episode)
            seen.update((number, step) for step in range(row.plan.targets_from, row.plan.last + 1))
        if loader_state.places["scienceworld/fork"][0] == 2:
            break
    assert loader_state.places["scienceworld/gold"][0] < 2
    forks = [seen[i, step] for i in (8, 9) for step in range(1, many[i].last_step + 1)]
    assert min(forks) >= 2


def test_branches_leave_more_often_before_runs_of_equal_actions(episodes):
    """Against the same places drawn without weight."""

    def share(weight: float) -> float:
        hits = []
        for index, plan in planned(episodes, replace(DATA, repeat_weight=weight, max_branches=1)):
            actions = [int(a[0]) for a in episodes[index].actions[1:]]
            for branch in plan.branches:
                ahead = actions[branch.step : branch.step + DATA.max_horizon]
                hits.append(any(a == b for a, b in itertools.pairwise(ahead)))
        return float(np.mean(hits))

    assert share(30.0) > share(1.0) + 0.05


def test_branches_leave_more_often_where_two_observations_ahead_are_equal(episodes):
    """Among others' worlds the weight changes nothing."""
    told = [[tuple(text) for text in e.observations] for e in episodes]
    for texts in told:
        texts[2::7] = [("no",)] * len(texts[2::7])
        texts[4::7] = [("no",)] * len(texts[4::7])
    same = [
        like(e, [np.full(2, 9) if text == ("no",) else np.array(text) for text in texts])
        for e, texts in zip(episodes, told, strict=True)
    ]

    def share(weights: dict[str, float]) -> float:
        hits = []
        for index, plan in planned(same, replace(DATA, echo_weights=weights, max_branches=1)):
            for branch in plan.branches:
                ahead = told[index][branch.step + 1 : branch.step + 1 + DATA.max_horizon]
                hits.append(len(set(ahead)) < len(ahead))
        return float(np.mean(hits))

    assert share({"scienceworld": 30.0}) > share({}) + 0.05
    assert share({"alfworld": 30.0}) == share({})


@pytest.mark.parametrize("groups", [1, 2, 4, 7])
def test_the_partition_is_the_best_of_all(groups):
    """Of every way to cut the rows."""
    widths = np.random.default_rng(1).integers(1, 50, (7, 2))

    def padded(cuts: tuple[int, ...]) -> int:
        return sum((b - a) * int(widths[a:b].max(0).sum()) for a, b in itertools.pairwise((0, *cuts, 7)))

    best = min(padded(cuts) for cuts in itertools.combinations(range(1, 7), groups - 1))
    found = partition(widths, groups)
    assert len(found) == groups
    assert padded(tuple(end for _, end in found[:-1])) == best


def test_a_stream_goes_on_from_any_cursor_as_if_it_had_not_stopped(episodes):
    def stream() -> BatchStream:
        sources = make_sources(episodes[:20], DATA, ObjectiveConfig(), BUILDER, True, 3)
        return BatchStream(sources, BUILDER, BatchConfig(16, 4000, 4), 0, trunk_and_branches)

    whole = list(itertools.islice(stream().steps(LoaderState()), 30))
    assert whole[-1][1].places["scienceworld/gold"][0] > 0
    for stop in (1, 7, 28):
        saved = LoaderState(**json.loads(json.dumps(asdict(whole[stop][1]))))
        rows, loader_state = next(stream().steps(saved))
        assert loader_state == whole[stop + 1][1]
        assert [row.plan for row in rows] == [row.plan for row in whole[stop + 1][0]]
        assert [row.row.tokens for row in rows] == [row.row.tokens for row in whole[stop + 1][0]]
    first, second = (list(stream().sources[0].epoch(number)) for number in (0, 1))
    assert first != second


def test_an_epoch_planned_in_parts_has_the_same_targets_and_resumes_within_each(episodes, monkeypatch):
    monkeypatch.setattr(sampler, "PART", 7)
    (source,) = make_sources(episodes, DATA, ObjectiveConfig(), BUILDER, True, 3)
    rows, places = [], [SourcePosition()]
    for _ in range(2 * len(planned(episodes))):
        row, place = source.take(places[-1])
        rows.append(row)
        places.append(place)
    first = [row for row, place in zip(rows, places[1:], strict=True) if place.epoch == 0]
    steps = Counter((id(row.episode), s) for row in first for s in range(row.plan.targets_from, row.plan.last + 1))
    assert set(steps.values()) == {1}
    assert len(steps) == sum(episode.last_step for episode in episodes)
    for at in (20, 3, len(first) - 1, len(first), len(first) + 5):
        (again,) = make_sources(episodes, DATA, ObjectiveConfig(), BUILDER, True, 3)
        for row, place in (again.take(places[at]), source.take(places[at])):
            assert (row.plan, place) == (rows[at].plan, places[at + 1])
