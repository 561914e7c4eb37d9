"""Rewards are fitted to goals while everything else stays as it was."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from lab.__main__ import main
from lab.studies import fit_goals, goal_rows
from lab.studies.fit_goals import Fit, Goals, Pool, Reader, batch_loss, read_rows, run_levels
from lab.studies.goal_rows import (
    FACTS,
    Batch,
    Extent,
    Kinds,
    Row,
    decided_by_the_action,
    facts_of,
    nearly_reached,
    show,
)
from loopwm.records.episodes import Episode, Step, write_episodes
from loopwm.records.template import Context, Transition
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import MOST_POINTS
from loopwm.text.world import WorldModel
from tests.fixtures.models import random_model, save_checkpoint

THINGS = ("mug", "egg")


def episode(wanted: str, thing: str, wording: str = "put a {} in desk.") -> Episode:
    """An episode in which a thing is moved, won if it is the one that is wanted."""
    goal, won = f"Your task is to: {wording.format(wanted)}", wanted == thing
    first = Step(None, f"You see a desk 1, and a shelf 1.\n\n{goal}", 0, False)
    take = Step(f"take {thing} 1 from shelf 1", f"You pick up the {thing} 1 from the shelf 1.", 0, False)
    move = Step(f"move {thing} 1 to desk 1", f"You move the {thing} 1 to the desk 1.", 100 * won, won)
    hidden = "On the shelf 1, you see a mug 1, a egg 1.\nOn the desk 1, you see nothing."
    return Episode("alfworld", "any", f"{wanted}/{thing}", "train", "expert", goal, (first, take, move), hidden)


BARE = Extent(0, 1)
EPISODES = [episode(wanted, thing) for wanted in THINGS for thing in THINGS]


@pytest.fixture(autouse=True)
def with_answers(monkeypatch) -> None:
    """Show every action but the last one with its answer, unless a test says otherwise."""
    monkeypatch.setattr(goal_rows, "AHEAD_SHARE", 0.0)


@pytest.fixture
def model(tokenizer) -> WorldModel:
    return WorldModel(random_model(prediction_heads=True, monitor_head=True), tokenizer)


def rows_of(model: WorldModel, episodes: list[Episode], extent: Extent, kinds: Kinds | None = None) -> list[Row]:
    parts = [show(model, one, extent, kinds, Random(0)) for one in episodes]
    return read_rows(model, Reader(model.model), parts)


@pytest.mark.parametrize("steps", [1, 2, 99])
def test_a_row_is_what_a_world_sees_after_the_last_action(model, steps) -> None:
    first, take, move = EPISODES[0].steps
    batch = Batch.of(rows_of(model, EPISODES[:1], Extent(None, steps)))
    history = (Transition(take.action, take.observation),) if steps > 1 else ()
    world = model.advance(model.encode([Context(EPISODES[0].goal, first.observation, history)]), [move.action])
    row, position = batch.slots[batch.last][0]
    latent = Reader(model.model).latent(batch.ids, batch.state)[row, position]
    torch.testing.assert_close(latent, world.latent[0, 0], atol=0.02, rtol=0.02)  # states are kept in half precision
    torch.testing.assert_close(batch.before[row, position], latent, atol=0.02, rtol=0.02)


def test_the_last_actions_of_some_rows_are_imagined(model, monkeypatch) -> None:
    monkeypatch.setattr(goal_rows, "AHEAD_SHARE", 1.0)
    first, take, move = EPISODES[0].steps
    batch = Batch.of(rows_of(model, EPISODES[:1], Extent(None, 99)))
    world = model.advance(model.encode([Context(EPISODES[0].goal, first.observation)]), [take.action])
    worlds = [world, model.advance(world, [move.action])]
    latent = Reader(model.model).latent(batch.ids, batch.state)
    for (row, position), ahead in zip(batch.slots, worlds, strict=True):
        torch.testing.assert_close(latent[row, position], ahead.latent[0, 0], atol=0.02, rtol=0.02)


def test_every_action_of_a_row_has_its_reward(model) -> None:
    batch = Batch.of(rows_of(model, [EPISODES[0], EPISODES[1]], Extent(None, 99)))
    assert (batch.points - MOST_POINTS).tolist() == [0, 100, 0, 0]
    assert batch.ends.tolist() == [0, 1, 0, 0]
    assert batch.last.tolist() == [False, True] * 2
    slot = model.tokenizer(model.slots.after_action, add_special_tokens=False)["input_ids"][-1]
    assert {int(batch.ids[row, position]) for row, position in batch.slots} == {slot}


def test_padding_changes_nothing(model) -> None:
    rows = rows_of(model, [EPISODES[0], EPISODES[-1]], BARE)
    reader, together = Reader(model.model), Batch.of(rows)
    latent = reader.latent(together.ids, together.state)
    for i, row in enumerate(rows):
        alone = Batch.of([row])
        torch.testing.assert_close(latent[i, : len(row.ids)], reader.latent(alone.ids, alone.state)[0])


def test_texts_are_those_of_the_model(model) -> None:
    batch, reader = Batch.of(rows_of(model, EPISODES[:2], BARE)), Reader(model.model)
    chosen = torch.tensor([[0, 3], [1, 5]])
    ours = reader.log_probabilities(batch.ids, reader.latent(batch.ids, batch.state), chosen)
    expected = model.model(batch.ids).logits.log_softmax(-1)[chosen[:, 0], chosen[:, 1]]
    torch.testing.assert_close(ours, expected, atol=0.05, rtol=0)


@pytest.mark.parametrize("weight", ["TEXT_WEIGHT", "ACCEPT_WEIGHT", "MONITOR_WEIGHT"])
def test_a_model_that_changes_is_held_to_what_it_was(model, monkeypatch, weight) -> None:
    for name in ("TEXT_WEIGHT", "ACCEPT_WEIGHT", "MONITOR_WEIGHT", "OTHERS_WEIGHT"):
        monkeypatch.setattr(fit_goals, name, float(name == weight))
    batch = Batch.of(rows_of(model, EPISODES, Extent(None, 99)))
    reader, teacher = Reader(model.model), Reader(deepcopy(model.model))
    same, _ = batch_loss(reader, teacher, torch.nn.ModuleList(), batch)
    with torch.no_grad():
        for parameter in model.model.model.core.coda.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        for parameter in (*reader.heads.acceptance.parameters(), *reader.monitor.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape))
    changed, _ = batch_loss(reader, teacher, torch.nn.ModuleList(), batch)
    assert changed > same + 0.01
    if weight != "ACCEPT_WEIGHT":  # of which the entropy is left
        assert float(same) == pytest.approx(0, abs=1e-3)


def test_facts_are_what_a_goal_asks_for_and_what_was_done() -> None:
    kinds = Kinds()
    one = episode("mug", "egg", "heat some {} and put it in desk.")
    heat = Step("heat egg 1 with microwave 1", "You heat the egg 1 using the microwave 1.", 0, False)
    one = replace(one, steps=(*one.steps[:2], heat, one.steps[2]))
    took, heated, moved = facts_of(one, kinds)
    mug, desk, egg = (kinds.numbers[name] for name in ("mug", "desk", "egg"))
    assert took == [mug, desk, 2, 0, 0, 0, 0, egg, 0, 0, 0, 0]
    assert heated == [mug, desk, 2, 0, 0, 0, 0, egg, 0, 1, 0, 0]
    assert moved == [mug, desk, 2, 0, 0, egg, desk, 0, 0, 1, 0, 0]
    assert facts_of(episode("egg", "egg"), kinds)[-1][-1] == 1
    assert all(value < size for row in (took, heated, moved) for value, size in zip(row, FACTS, strict=True))


def test_kinds_beyond_the_last_number_are_none(monkeypatch) -> None:
    monkeypatch.setattr(goal_rows, "KINDS", 3)
    kinds = Kinds()
    assert [kinds(name) for name in ("mug 1", "egg 2", "mug 3", "pan 1", None)] == [1, 2, 1, 0, 0]


def test_a_miss_ends_with_what_reaches_goals() -> None:
    looks = replace(EPISODES[1], steps=EPISODES[1].steps[:2])
    assert nearly_reached(EPISODES[1])
    assert not nearly_reached(looks)
    assert Goals([*EPISODES, looks]).missed == [EPISODES[1], EPISODES[2]]


def test_levels_of_few_steps_have_goals_that_these_decide() -> None:
    hard = [episode("mug", thing, "put two {} in desk.") for thing in THINGS]
    goals = Goals([*EPISODES, *hard])
    drawn = [goals.draw(level, Random(seed)) for level in (BARE, Extent(None, 3)) for seed in range(20)]
    assert all(decided_by_the_action(one) for one in drawn)
    assert any(one in hard for one in (goals.draw(Extent(None, 4), Random(seed)) for seed in range(40)))
    assert {goals.draw(BARE, Random(seed)).steps[-1].done for seed in range(20)} == {True, False}


def test_a_missed_goal_is_like_one_that_is_won_as_often(monkeypatch) -> None:
    monkeypatch.setattr(fit_goals, "LIKE_SHARE", 1.0)
    pans = [episode("pan", thing, "put a {} in shelf.") for thing in THINGS] * 9  # never won
    goals = Goals([*EPISODES, *pans])
    drawn = [goals.draw(BARE, Random(seed)) for seed in range(60)]
    assert not any("pan" in one.goal for one in drawn)
    assert {(one.goal, one.steps[-1].done) for one in drawn} == {(one.goal, one.steps[-1].done) for one in EPISODES}


def test_a_level_ends_when_it_is_learnt_or_takes_long(model, monkeypatch) -> None:
    monkeypatch.setattr(fit_goals, "LEVELS", (BARE, Extent(1, 1), Extent(2, 1), Extent(None, 99)))
    monkeypatch.setattr(fit_goals, "FIRST_UPDATES", 5)
    monkeypatch.setattr(fit_goals, "LEAST_UPDATES", 3)
    monkeypatch.setattr(fit_goals, "MOST_UPDATES", 7)
    monkeypatch.setattr(fit_goals, "EARLIER_SHARE", 0.0)
    starts, losses = [], iter([0.1] * 5 + [-9.0] * 3 + [0.7] * 7 + [0.1] * 5)
    fit = Fit(Reader(model.model), Reader(model.model), 20, 0.1)

    def update(batch: Batch) -> float:
        fit.done += 1
        return next(losses)

    monkeypatch.setattr(fit, "update", update)
    rows = rows_of(model, EPISODES, BARE)

    def new_pool(level: Extent) -> Pool:
        starts.append(fit.done)
        parts = (show(model, EPISODES[0], level, Kinds(), Random(0)) for _ in iter(int, 1))
        return Pool(parts, lambda parts: rows[: len(list(parts))], Random(0))

    run_levels(fit, new_pool, None, Random(0))
    assert (starts, fit.done) == ([0, 5, 8, 15], 20)


def test_the_rate_rises_and_falls_to_zero(model) -> None:
    batch = Batch.of(rows_of(model, EPISODES, BARE, Kinds()))
    fit = Fit(Reader(model.model), Reader(deepcopy(model.model)), 100, 1.0)
    rates = []
    for done in (0, 24, 60, 85, 99):
        fit.done = done
        fit.update(batch)
        rates.append(fit.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1 / 50, 0.5, 1, 0.5, 1 / 30])


def test_what_a_goal_decides_by_the_action_alone() -> None:
    worded = [
        episode("mug", "mug", wording)
        for wording in ("put a {} in desk.", "put some {} on desk.", "put a hot {} in desk.", "put two {} in desk.",
                        "look at {} under the desklamp.")
    ]  # fmt: skip
    assert [decided_by_the_action(one) for one in worded] == [True, True, False, False, False]


def test_stages_show_some_places_and_the_one_that_counts() -> None:
    one = episode("mug", "mug")
    room = f"In a room, you see a desk 1, a shelf 1, a safe 1, and a bed 1.\n\n{one.goal}"
    one = replace(one, steps=(replace(one.steps[0], observation=room), *one.steps[1:]))
    assert goal_rows.fewer_places(one, 1, Random(0)) == f"In a room, you see a desk 1.\n\n{one.goal}"
    assert goal_rows.fewer_places(one, 3, Random(0)).count(" 1") == 3
    assert goal_rows.fewer_places(one, 9, Random(0)).count(" 1") == 4
    assert goal_rows.fewer_places(one, 0, Random(0)) == goal_rows.ROOM


def test_the_command_fits_rewards_and_changes_the_coda_and_their_heads_only(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fit_goals, "LEVELS", (BARE, Extent(1, 1), Extent(None, 99)))
    monkeypatch.setattr(fit_goals, "FIRST_UPDATES", 200)
    monkeypatch.setattr(fit_goals, "LEAST_UPDATES", 2)
    monkeypatch.setattr(fit_goals, "POOL", 40)
    monkeypatch.setattr(fit_goals, "TEXT_WEIGHT", 0.0)  # a random model's texts say nothing
    save_checkpoint(tmp_path / "model", model.model.bfloat16())
    write_episodes(tmp_path / "goals.jsonl", EPISODES)
    lookers = [replace(one, env="scienceworld", steps=one.steps[:2]) for one in EPISODES[:3]]
    write_episodes(tmp_path / "others.jsonl", lookers)
    given = ["--model", str(tmp_path / "model"), "--goals", str(tmp_path / "goals.jsonl")]
    given += ["--others", str(tmp_path / "others.jsonl"), "--rate", "0.01", "--updates", "260"]
    assert main(["fit-goals", *given, "--out", str(tmp_path / "out")]) == 0
    old, new = (load_checkpoint(tmp_path / name)[0] for name in ("model", "out"))
    after = new.state_dict()
    changed = {name for name, weight in old.state_dict().items() if not torch.equal(weight, after[name])}
    assert changed
    parts = ("model.core.coda.", "model.heads.points.", "model.heads.continuation.")
    assert all(name.startswith(parts) for name in changed)
    worlds = WorldModel(new, model.tokenizer)
    rewards = {}
    for one in (EPISODES[0], EPISODES[1]):  # a mug is wanted and moved; a mug is wanted and an egg is moved
        context = Context(one.goal, goal_rows.ROOM)
        ahead = worlds.predictions(worlds.advance(worlds.encode([context]), [one.steps[-1].action]))
        rewards[one.variation] = ahead.reward.item(), ahead.continuation.item() < 0.5
    assert rewards == {"mug/mug": (100.0, True), "mug/egg": (0.0, False)}


def test_episodes_of_one_outcome_are_refused(model, tmp_path, capsys) -> None:
    save_checkpoint(tmp_path / "model", model.model)
    write_episodes(tmp_path / "goals.jsonl", [one for one in EPISODES if one.steps[-1].done])
    given = ["--model", str(tmp_path / "model"), "--goals", str(tmp_path / "goals.jsonl")]
    assert main(["fit-goals", *given, "--out", str(tmp_path / "out")]) == 2
    assert "must hold episodes that were won and others" in capsys.readouterr().err
    assert main(["fit-goals", *given, "--out", str(tmp_path / "model")]) == 2


def test_a_model_without_heads_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", random_model())
    write_episodes(tmp_path / "goals.jsonl", EPISODES)
    given = ["--model", str(tmp_path / "model"), "--goals", str(tmp_path / "goals.jsonl")]
    assert main(["fit-goals", *given, "--out", str(tmp_path / "out")]) == 2
