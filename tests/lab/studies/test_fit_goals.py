"""Rewards are fitted to goals while everything else stays as it was."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from lab.__main__ import main
from lab.studies import fit_goals
from lab.studies.fit_goals import (
    Batch,
    Reader,
    Stage,
    balanced,
    batch_loss,
    decided_by_the_action,
    read_rows,
    shown_text,
)
from loopwm.records.episodes import Episode, Step, write_episodes
from loopwm.records.template import Context, Transition
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.world import WorldModel
from tests.fixtures.models import random_model, save_checkpoint

THINGS = ("mug", "egg")


def episode(wanted: str, thing: str, wording: str = "put a {} in desk.") -> Episode:
    """An episode in which a thing is moved, won if it is the one that is wanted."""
    goal, won = f"Your task is to: {wording.format(wanted)}", wanted == thing
    first = Step(None, f"You see a desk 1, and a shelf 1.\n\n{goal}", 0, False)
    take = Step(f"take {thing} 1 from shelf 1", f"You pick up the {thing} 1 from the shelf 1.", 0, False)
    move = Step(f"move {thing} 1 to desk 1", f"You move the {thing} 1 to the desk 1.", 100 * won, won)
    return Episode("alfworld", "any", f"{wanted}/{thing}", "train", "expert", goal, (first, take, move))


BARE = Stage(0, 1, 200)
EPISODES = [episode(wanted, thing) for wanted in THINGS for thing in THINGS]


@pytest.fixture
def model(tokenizer) -> WorldModel:
    return WorldModel(random_model(prediction_heads=True), tokenizer)


@pytest.mark.parametrize("steps", [1, 2, 99])
def test_a_row_is_what_a_world_sees_after_the_last_action(model, steps) -> None:
    first, take, move = EPISODES[0].steps
    (row,) = read_rows(model, EPISODES[:1], partial(shown_text, model, Stage(None, steps, 0), Random(0)))
    batch = Batch.of([row])
    history = (Transition(take.action, take.observation),) if steps > 1 else ()
    world = model.advance(model.encode([Context(EPISODES[0].goal, first.observation, history)]), [move.action])
    latent = Reader(model.model).latent(batch)[0, batch.last[0]]
    torch.testing.assert_close(latent, world.latent[0, 0], atol=0.02, rtol=0.02)  # states are kept in half precision


def test_padding_changes_nothing(model) -> None:
    rows = read_rows(model, [EPISODES[0], EPISODES[-1]], partial(shown_text, model, BARE, Random(0)))
    reader, together = Reader(model.model), Batch.of(rows)
    for i, row in enumerate(rows):
        alone = Batch.of([row])
        expected = reader.latent(alone)[0, alone.last[0]]
        torch.testing.assert_close(reader.latent(together)[i, together.last[i]], expected)


def test_texts_are_those_of_the_model(model) -> None:
    rows = read_rows(model, EPISODES[:2], partial(shown_text, model, BARE, Random(0)))
    reader, batch = Reader(model.model), Batch.of(rows)
    chosen = torch.tensor([[0, 3], [1, 5]])
    ours = reader.log_probabilities(batch, reader.latent(batch), chosen)
    expected = model.model(batch.ids).logits.log_softmax(-1)[chosen[:, 0], chosen[:, 1]]
    torch.testing.assert_close(ours, expected, atol=0.05, rtol=0)


def test_a_model_that_has_not_changed_is_held_to_nothing(model, monkeypatch) -> None:
    """The distance from what it was is zero, so that only the entropy of what it says of ends and actions is left."""
    rows = read_rows(model, EPISODES[:4], partial(shown_text, model, BARE, Random(0)))
    reader = Reader(model.model)
    teacher, batch = Reader(deepcopy(model.model)), Batch.of(rows)
    same = batch_loss(reader, teacher, batch, int(rows[0].ids[-1]), keep=True)
    with torch.no_grad():
        for parameter in reader.fitted():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    changed = batch_loss(reader, teacher, batch, int(rows[0].ids[-1]), keep=True)
    monkeypatch.setattr(fit_goals, "TEXT_WEIGHT", 0.0)
    without_texts = batch_loss(reader, teacher, batch, int(rows[0].ids[-1]), keep=True)
    assert changed > without_texts + 0.01 > same
    chances = teacher.heads(teacher.latent(batch)[torch.arange(4), batch.last][:, None])
    entropy = [torch.distributions.Bernoulli(logits=logits).entropy().mean() for logits in chances[1:]]
    assert float(same) == pytest.approx(float(entropy[0] + fit_goals.ACCEPT_WEIGHT * entropy[1]), abs=1e-4)


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
    assert fit_goals.fewer_places(one, 1, Random(0)) == f"In a room, you see a desk 1.\n\n{one.goal}"
    assert fit_goals.fewer_places(one, 3, Random(0)).count(" 1") == 3
    assert fit_goals.fewer_places(one, 9, Random(0)).count(" 1") == 4
    assert fit_goals.fewer_places(one, 0, Random(0)) == fit_goals.ROOM


def test_rows_are_balanced() -> None:
    chosen = balanced(EPISODES * 2, 6, Random(0))
    assert [one.steps[-1].done for one in chosen] == [True] * 3 + [False] * 3
    assert len(balanced(EPISODES, 100, Random(0))) == 2 * len(THINGS)


def test_the_command_fits_rewards_and_changes_the_coda_and_their_heads_only(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fit_goals, "STAGES", (BARE, Stage(1, 1, 2), Stage(None, 99, 2)))
    monkeypatch.setattr(fit_goals, "TEXT_WEIGHT", 0.0)  # a random model's texts say nothing
    save_checkpoint(tmp_path / "model", model.model.bfloat16())
    write_episodes(tmp_path / "goals.jsonl", EPISODES)
    lookers = [replace(one, env="scienceworld", steps=one.steps[:2]) for one in EPISODES[:3]]
    write_episodes(tmp_path / "kept.jsonl", lookers)
    given = ["--model", str(tmp_path / "model"), "--goals", str(tmp_path / "goals.jsonl")]
    given += ["--kept", str(tmp_path / "kept.jsonl"), "--rate", "0.01"]
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
        context = Context(one.goal, fit_goals.ROOM)
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
