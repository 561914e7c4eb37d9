"""A policy is cloned, improved in imagination and played."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

from data_prep.environments import ENVIRONMENTS
from lab.__main__ import main
from lab.agents.latent_policy import Choice, Choices, LatentPolicy, Reading, actions_in_reach
from lab.studies import imagined_policy
from lab.studies.imagined_policy import Chosen, Imagination, clone, demonstrated
from loopwm.records.episodes import Episode, recorded_episodes, write_episodes
from loopwm.records.template import Context
from loopwm.text.world import World, WorldModel
from loopwm.worlds.protocol import longer
from tests.fixtures.kitchen import Kitchen
from tests.fixtures.models import random_model, save_checkpoint

WAY = (
    "go to fridge 1", "open fridge 1", "take mug 1 from fridge 1", "go to microwave 1", "heat mug 1 with microwave 1",
    "go to cabinet 2", "move mug 1 to cabinet 2",
)  # fmt: skip


def expert(variation: str = "hot", *more: str) -> Episode:
    world = Kitchen()
    first, goal = world.reset("put", variation), world.goal()
    steps = (first, *map(world.step, (*WAY[:2], *more, *WAY[2:])))
    return Episode("alfworld", "put", variation, "train", "expert", goal, steps)


@pytest.fixture(scope="module")
def model(tokenizer) -> WorldModel:
    return WorldModel(random_model(prediction_heads=True, reward_attention=True), tokenizer)


@pytest.fixture
def policy(model) -> LatentPolicy:
    torch.manual_seed(0)
    return LatentPolicy(model.model)


@torch.inference_mode()
def demonstrations(model: WorldModel, episode: Episode) -> list[Chosen]:
    return list(demonstrated(model, episode))


def test_demonstrations_leave_out_what_only_tidies(model) -> None:
    for episode in (expert(), expert("hot", "examine fridge 1", "close fridge 1")):
        assert [one.choice.actions[one.index] for one in demonstrations(model, episode)] == list(WAY)


def test_a_clone_does_as_it_was_shown(model, policy) -> None:
    shown = demonstrations(model, expert())
    clone(policy, shown, 80, 1e-2, Random(0))
    logits = policy(Choices.of([one.choice for one in shown]))
    assert logits.argmax(-1).tolist() == [one.index for one in shown]


def pays(monkeypatch: pytest.MonkeyPatch, chances: list[float]) -> list[float]:
    """Predict these chances of a win, one look after another, and none after them; decode little.

    Returns what was predicted.
    """
    left, predicted, look = iter(chances), list[float](), Reading.look

    def look_and_predict(reading: Reading, actions: Sequence[str]) -> tuple[World, Choice]:
        worlds, choice = look(reading, actions)
        predicted.append(next(left, 0.0))
        first = torch.full((len(actions), 1), predicted[-1])
        return worlds, replace(choice, predicted=torch.cat([first, choice.predicted[:, 1:]], -1))

    monkeypatch.setattr(Reading, "look", look_and_predict)
    monkeypatch.setattr(imagined_policy, "MOST_DECODED", 5)
    return predicted


def test_a_win_is_an_episode_up_to_the_action_that_is_predicted_to_win(model, policy, monkeypatch) -> None:
    pays(monkeypatch, [0.5, 0.9, 0, 0.96])
    start, lengths = expert(), []
    monkeypatch.setattr(
        imagined_policy,
        "actions_in_reach",
        lambda context: lengths.append(len(context.history)) or actions_in_reach(context),
    )
    (win,) = Imagination(model, 3, 2, 0).wins(policy, [start])
    assert (win.goal, win.policy, win.steps[0], win.hidden_state) == (start.goal, "imagined", start.steps[0], None)
    assert [(step.score, step.done) for step in win.steps] == [(0, False), (0, False), (100, True)]
    assert lengths == [0, 0, 1, 1]  # each try has a history of its own
    context = Context(win.goal, win.steps[0].observation)
    assert win.steps[1].action in actions_in_reach(context)
    assert win.steps[2].action in actions_in_reach(longer(context, win.steps[1].action, win.steps[1].observation))


def test_starts_are_won_each_by_itself_or_not_at_all(model, policy, monkeypatch) -> None:
    predicted = pays(monkeypatch, [0, 0, 1, 0, 0, 0])  # two tries of each: the first of the second start wins
    wins = Imagination(model, 2, 2, 0).wins(policy, [expert(), expert("plain")])
    assert [win.variation for win in wins] == ["plain"]
    assert len(predicted) == 6  # a start that was won is not tried on
    pays(monkeypatch, [])
    assert Imagination(model, 2, 2, 0).wins(policy, [expert()]) == []


def test_draws_of_one_start_differ_and_those_of_a_seed_do_not(model, policy, monkeypatch) -> None:
    monkeypatch.setattr(imagined_policy, "SURE", 0)

    def drawn(seed: int) -> list[str | None]:
        imagination = Imagination(model, 1, 1, seed)
        return [imagination.wins(policy, [expert()])[0].steps[1].action for _ in range(6)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0))) > 1


def test_the_command_clones_imagines_plays_and_resumes(model, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "alfworld", Kitchen)
    monkeypatch.setattr(imagined_policy, "SURE", 0)  # every imagined action wins
    save_checkpoint(tmp_path / "model", model.model)
    write_episodes(tmp_path / "shown.jsonl", [expert(), replace(expert("plain"), variation="plain")])
    given = ["--model", str(tmp_path / "model"), "--split", "dev", "--rounds", "2", "--tries", "2"]
    given += ["--imagined-steps", "2", "--count", "2", "--epochs", "60", "--rate", "0.01", "--max-steps", "9"]
    given += ["--demonstrations", str(tmp_path / "shown.jsonl"), "--starts", str(tmp_path / "shown.jsonl")]
    out = tmp_path / "out"
    assert main(["imagined-policy", *given, "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["n"] == 3
    assert results["arms"]["cloned"]["won"]["mean"] == 100
    # both starts are won in the first round
    assert sorted(path.name for path in out.glob("imagined-*")) == [
        "imagined-1", "imagined-1.pt", "imagined-2.pt",
    ]  # fmt: skip
    weights = [torch.load(out / name)["score.weight"] for name in ("cloned.pt", "imagined-1.pt")]
    assert not torch.equal(*weights)
    assert [win.policy for win in recorded_episodes([out / "imagined-1"])] == ["imagined"] * 2
    assert "imagined - cloned" in capsys.readouterr().out

    (out / "plays.jsonl").write_text("".join((out / "plays.jsonl").read_text().splitlines(keepends=True)[:1]))
    (out / "results.json").unlink()
    (out / "imagined-2.pt").unlink()
    assert main(["imagined-policy", *given, "--out", str(out)]) == 0
    again = json.loads((out / "results.json").read_text())
    assert again["arms"] == results["arms"]
    assert main(["imagined-policy", *given, "--count", "3", "--out", str(tmp_path / "few")]) == 2
    assert "--count: must be at most 2, the episodes of ALFWorld, got 3" in capsys.readouterr().err
    assert main(["imagined-policy", *given, "--seed", "1", "--out", str(out)]) == 2
    assert "seed must be 0 as in the folder" in capsys.readouterr().err
    write_episodes(tmp_path / "shown.jsonl", [expert(), replace(expert("plain"), variation="other")])
    assert main(["imagined-policy", *given, "--out", str(out)]) == 2
    assert "_sha256 must be" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--demonstrations", "--starts"])
def test_held_out_episodes_are_refused(model, tmp_path, capsys, option) -> None:
    save_checkpoint(tmp_path / "model", model.model)
    write_episodes(tmp_path / "train.jsonl", [expert()])
    write_episodes(tmp_path / "test.jsonl", [replace(expert(), split="test")])
    files = {"--demonstrations": "train.jsonl", "--starts": "train.jsonl"} | {option: "test.jsonl"}
    given = [text for name, file in files.items() for text in (name, str(tmp_path / file))]
    assert main(["imagined-policy", "--model", str(tmp_path / "model"), *given, "--out", str(tmp_path / "out")]) == 2
    assert f"{option}: split: 'test' in put, must be train" in capsys.readouterr().err


def test_a_model_without_reward_attention_is_refused(tmp_path, capsys) -> None:
    save_checkpoint(tmp_path / "model", random_model(prediction_heads=True))
    write_episodes(tmp_path / "shown.jsonl", [expert()])
    given = ["--demonstrations", str(tmp_path / "shown.jsonl"), "--starts", str(tmp_path / "shown.jsonl")]
    assert main(["imagined-policy", "--model", str(tmp_path / "model"), *given, "--out", str(tmp_path / "out")]) == 2
    assert "must have reward attention" in capsys.readouterr().err
