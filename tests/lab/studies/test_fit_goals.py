"""Rewards are fitted to goals while everything else stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.__main__ import main
from lab.studies import fit_goals, goal_rows
from lab.studies.fit_goals import Goals, Lesson, batch_loss, fit, outcomes, read_rows, with_reward_attention
from lab.studies.goal_rows import (
    EARLIER_WEIGHT,
    FACTS,
    MOVED_WEIGHT,
    UNKNOWN,
    Batch,
    Extent,
    Kinds,
    Row,
    Taught,
    decided_by_the_action,
    facts_of,
    goal_taught,
    nearly_reached,
    reward_taught,
    show,
)
from loopwm.records.episodes import Episode, Step, write_episodes
from loopwm.records.template import Context, Transition
from loopwm.records.training_episodes import TrainingEpisodes, episode_hash
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
    random = random_model(prediction_heads=True, reward_attention=True)
    with torch.no_grad():
        for parameter in (*random.model.reward_attention.parameters(), *random.model.heads.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return WorldModel(random, tokenizer)


def rows_of(
    model: WorldModel, episodes: list[Episode], extent: Extent, teach: Callable[[Episode], Taught] = reward_taught
) -> list[Row]:
    return read_rows(model, [show(model, one, extent, teach, Random(0)) for one in episodes])


def teach_goals(episode: Episode) -> Taught:
    return goal_taught(episode, Kinds())


def predicted(model: WorldModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return expected rewards and continuation of the real slots of a batch."""
    _, points, continuation = outcomes(model.model, batch)
    values = torch.arange(-MOST_POINTS, MOST_POINTS + 1.0)
    real = batch.weights.flatten() > 0
    return (points.softmax(-1) @ values)[real], continuation.sigmoid()[real]


@pytest.mark.parametrize("steps", [1, 2, 99])
def test_a_slot_is_what_a_world_predicts_after_the_action(model, steps) -> None:
    first, take, move = EPISODES[0].steps
    reward, continuation = predicted(model, Batch.of(rows_of(model, EPISODES[:1], Extent(None, steps))))
    history = (Transition(take.action, take.observation),) if steps > 1 else ()
    world = model.advance(model.encode([Context(EPISODES[0].goal, first.observation, history)]), [move.action])
    expected = model.predictions(world)
    # states are kept in half precision
    torch.testing.assert_close(reward[-1:], expected.expected_reward, atol=0.3, rtol=0.02)
    torch.testing.assert_close(continuation[-1:], expected.continuation, atol=0.01, rtol=0)


def test_the_last_actions_of_some_rows_are_imagined(model, monkeypatch) -> None:
    monkeypatch.setattr(goal_rows, "AHEAD_SHARE", 1.0)
    first, take, move = EPISODES[0].steps
    _, continuation = predicted(model, Batch.of(rows_of(model, EPISODES[:1], Extent(None, 99))))
    world = model.advance(model.encode([Context(EPISODES[0].goal, first.observation)]), [take.action])
    expected = [model.predictions(world), model.predictions(model.advance(world, [move.action]))]
    torch.testing.assert_close(continuation, torch.cat([one.continuation for one in expected]), atol=0.01, rtol=0)


def test_every_action_of_a_row_has_its_reward(model) -> None:
    batch = Batch.of(rows_of(model, [EPISODES[0], EPISODES[1]], Extent(None, 99)))
    assert (batch.points - MOST_POINTS).tolist() == [[0, 100], [0, 0]]
    assert batch.ends.tolist() == [[0, 1], [0, 0]]
    assert batch.last.tolist() == [[False, True]] * 2


def test_padding_changes_nothing(model) -> None:
    rows = rows_of(model, [EPISODES[0], replace(EPISODES[3], steps=EPISODES[3].steps[:2])], Extent(None, 99))
    together = predicted(model, Batch.of(rows))
    alone = [predicted(model, Batch.of([row])) for row in rows]
    for ours, expected in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.cat(expected), atol=1e-4, rtol=1e-4)


def heads_of(model: WorldModel, values: Sequence[int]) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(torch.nn.Linear(model.model.config.hidden_size, size) for size in values)


@pytest.mark.parametrize(("teach", "values"), [(teach_goals, FACTS), (reward_taught, ())])
def test_padding_is_not_taught(model, teach, values) -> None:
    rows = rows_of(model, [EPISODES[0], replace(EPISODES[3], steps=EPISODES[3].steps[:2])], Extent(None, 99), teach)
    heads, batch = heads_of(model, values), Batch.of(rows)
    real = batch.weights > 0
    other = replace(batch, points=torch.where(real, batch.points, 200), ends=torch.where(real, batch.ends, 1))
    assert not torch.equal(other.points, batch.points)
    assert batch_loss(model.model, heads, other)[0] == batch_loss(model.model, heads, batch)[0]


def test_an_unknown_fact_is_not_taught(model) -> None:
    batch = Batch.of(rows_of(model, EPISODES, BARE, teach_goals))
    heads, unknown = heads_of(model, FACTS), torch.full_like(batch.facts, UNKNOWN)
    taught, none_taught, no_heads = (
        batch_loss(model.model, given, replace(batch, facts=facts))[0]
        for given, facts in ((heads, batch.facts), (heads, unknown), (heads_of(model, ()), batch.facts))
    )
    assert taught > none_taught
    torch.testing.assert_close(none_taught, no_heads)


def test_actions_that_put_something_down_weigh_more_than_others() -> None:
    take, move = EPISODES[0].steps[1:]
    again = replace(EPISODES[0], steps=(*EPISODES[0].steps, take, move))
    assert goal_taught(again, Kinds()).weights == [EARLIER_WEIGHT, MOVED_WEIGHT, EARLIER_WEIGHT, 1]
    assert reward_taught(again).weights == [0.25] * 4


def test_a_model_without_the_attention_gets_one_that_changes_no_text(tokenizer) -> None:
    plain = random_model(prediction_heads=True)
    fitted = with_reward_attention(plain)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(fitted(ids).logits, plain(ids).logits)
    assert set(fitted.state_dict()) - set(plain.state_dict()) == {
        name for name in fitted.state_dict() if "reward_attention." in name or "heads.outcome." in name
    }
    again = with_reward_attention(fitted)
    assert again is not fitted
    torch.testing.assert_close(again.state_dict(), fitted.state_dict())


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


def test_rows_of_few_steps_have_goals_that_these_decide() -> None:
    hard = [episode("mug", thing, "put two {} in desk.") for thing in THINGS]
    goals = Goals([*EPISODES, *hard])
    drawn = [goals.draw(extent, Random(seed)) for extent in (BARE, Extent(None, 3)) for seed in range(20)]
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


def test_the_rate_rises_and_falls_to_zero(model, monkeypatch) -> None:
    rates = []
    step = torch.optim.AdamW.step

    def recorded(optimizer: torch.optim.AdamW) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    fit(model.model, [Lesson(rows_of(model, EPISODES, BARE, teach_goals), FACTS, 1.0)], 200, 1.0, Random(0))
    assert [rates[i] for i in (0, 49, 99, 129, 165, 199)] == pytest.approx([0.01, 0.5, 1, 1, 0.5, 1 / 70])


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


def test_the_command_fits_rewards_and_changes_nothing_else(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fit_goals, "PARTS", (BARE,))
    monkeypatch.setattr(fit_goals, "WHOLE_SHARE", 0.0)
    save_checkpoint(tmp_path / "model", random_model(prediction_heads=True).bfloat16())
    TrainingEpisodes({"games/other": np.array([7], dtype=np.uint64)}).save(tmp_path / "model")
    write_episodes(tmp_path / "goals.jsonl", EPISODES)
    lookers = [replace(one, env="scienceworld", steps=one.steps[:2]) for one in EPISODES[:3]]
    write_episodes(tmp_path / "others.jsonl", lookers)
    given = ["--model", str(tmp_path / "model"), "--goals", str(tmp_path / "goals.jsonl"), "--rows", "90"]
    given += ["--others", str(tmp_path / "others.jsonl"), "--rate", "0.01", "--updates", "250"]
    assert main(["fit-goals", *given, "--out", str(tmp_path / "out")]) == 0
    old, new = (load_checkpoint(tmp_path / name)[0] for name in ("model", "out"))
    after = new.state_dict()
    changed = {name for name, weight in old.state_dict().items() if not torch.equal(weight, after[name])}
    assert changed == {
        f"model.heads.{head}.{part}" for head in ("points", "continuation") for part in ("weight", "bias")
    }
    record = TrainingEpisodes.load(tmp_path / "out")
    assert record is not None
    assert record.hashes["games/other"].tolist() == [7]
    assert record.episodes("alfworld") == {int(episode_hash(one), 16) for one in EPISODES}
    assert record.holds_game("scienceworld", "scienceworld/any/mug/mug")
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


@pytest.mark.parametrize("option", ["--goals", "--others"])
def test_held_out_episodes_are_refused(tmp_path: Path, capsys, option: str) -> None:
    write_episodes(tmp_path / "train.jsonl", EPISODES)
    write_episodes(tmp_path / "dev.jsonl", [replace(EPISODES[0], split="dev")])
    files = {"--goals": "train.jsonl", "--others": "train.jsonl"} | {option: "dev.jsonl"}
    given = [text for name, file in files.items() for text in (name, str(tmp_path / file))]
    assert main(["fit-goals", "--model", str(tmp_path), *given, "--out", str(tmp_path / "out")]) == 2
    assert f"{option}: split: 'dev' in any, must be train" in capsys.readouterr().err


@pytest.mark.parametrize("shares", ["-0.1 0.5 0.3 0.3", "0 0 0 0"])
def test_shares_that_draw_no_rows_are_refused(tmp_path: Path, capsys, shares: str) -> None:
    given = ["--model", str(tmp_path), "--goals", str(tmp_path), "--shares", *shares.split()]
    assert main(["fit-goals", *given, "--out", str(tmp_path / "out")]) == 2
    assert "--shares: must not be below 0" in capsys.readouterr().err


def test_a_model_without_heads_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", random_model())
    write_episodes(tmp_path / "goals.jsonl", EPISODES)
    given = ["--model", str(tmp_path / "model"), "--goals", str(tmp_path / "goals.jsonl")]
    assert main(["fit-goals", *given, "--out", str(tmp_path / "out")]) == 2
