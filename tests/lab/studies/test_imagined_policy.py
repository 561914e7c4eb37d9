"""A policy is cloned, improved in imagination and played."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

from data_prep.environments import ENVIRONMENTS
from lab.__main__ import main
from lab.agents.latent_policy import Choices, LatentPolicy, actions_in_reach
from lab.studies import imagined_policy
from lab.studies.imagined_policy import (
    DISCOUNT,
    Chosen,
    Imagination,
    ImaginedEpisode,
    Start,
    Starts,
    clone,
    context_at,
    demonstrated,
    improve,
    with_advantages,
)
from loopwm.records.episodes import Episode, write_episodes
from loopwm.text.model.heads import Predictions
from loopwm.text.world import WorldModel
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


START = Start(context_at(expert(), 0), 3)


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


def test_starts_are_states_of_demonstrations_and_first_observations() -> None:
    starts = Starts([expert()], [expert("plain")], 10).draw(80, Random(0))
    assert Counter((one.limit, len(one.context.history) > 0) for one in starts) == {(10, False): 20, (5, True): 60}
    assert {len(one.context.history) for one in starts} == set(range(len(WAY)))
    assert starts[-1].context.history[0].action == WAY[0]
    assert "hot" in starts[-1].context.goal
    assert "hot" not in starts[0].context.goal


def imagined(outcomes: list[list[float]], chosen: list[Chosen]) -> list[ImaginedEpisode]:
    return [
        ImaginedEpisode(start, 9, None, list(chosen), outcome)  # type: ignore[arg-type]
        for start, group in enumerate(outcomes)
        for outcome in group
    ]


def test_advantages_are_against_episodes_of_the_same_start(model) -> None:
    one = demonstrations(model, expert())[:1]
    chosen = with_advantages(imagined([[0.9, 0.0, 0.0, 0.9], [0.5, 0.5], [0.0, 0.0], [0.8, 0.4]], one))
    assert [one.advantage for one in chosen] == pytest.approx([1, -1, -1, 1, 1, -1])


@pytest.mark.parametrize(("advantage", "rises"), [(1.0, True), (-1.0, False)])
def test_what_did_better_than_others_becomes_likelier_but_not_at_once(model, policy, advantage, rises) -> None:
    choice = demonstrations(model, expert())[0].choice

    def log_probability() -> float:
        return policy(Choices.of([choice])).log_softmax(-1)[0, 2].item()

    before = log_probability()
    chosen = [Chosen(choice, 2, before, advantage)] * 200
    improve(policy, chosen, torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0), Random(0))
    assert (log_probability() > before) is rises
    assert abs(log_probability() - before) < 1.5  # a ratio beyond the clip has no gradient


def test_an_imagined_episode_ends_where_a_win_is_predicted(model, policy, monkeypatch) -> None:
    pays = iter([0, 0, 0, 100, 0, 0])
    nothing = torch.zeros(1)
    monkeypatch.setattr(model, "predictions", lambda world: Predictions(torch.tensor([next(pays)]), *[nothing] * 3))
    monkeypatch.setattr(imagined_policy, "MOST_DECODED", 5)
    lost, won = Imagination(model, 0).episodes(policy, [START], 2)
    assert (won.outcome, won.over, len(won.chosen)) == (DISCOUNT, True, 2)
    assert (lost.outcome, lost.over, len(lost.chosen)) == (0, False, 3)
    assert [step.action for step in lost.reading.context.history] == [
        one.choice.actions[one.index] for one in lost.chosen
    ]


def test_what_is_drawn_has_the_probability_that_is_kept(model, policy) -> None:
    (episode,) = Imagination(model, 0).episodes(policy, [replace(START, limit=1)], 1)
    (chosen,) = episode.chosen
    assert len(chosen.choice.actions) == len(actions_in_reach(START.context))
    expected = policy(Choices.of([chosen.choice])).log_softmax(-1)[0, chosen.index].detach()
    assert chosen.log_probability == pytest.approx(float(expected), abs=1e-4)


def test_draws_of_one_start_differ_and_those_of_a_seed_do_not(model, policy) -> None:
    def drawn(seed: int) -> list[list[int]]:
        return [
            [one.index for one in episode.chosen] for episode in Imagination(model, seed).episodes(policy, [START], 3)
        ]

    assert drawn(0) == drawn(0) != drawn(1)
    assert len({tuple(indices) for indices in drawn(0)}) > 1


def test_the_command_clones_imagines_plays_and_resumes(model, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "alfworld", Kitchen)
    save_checkpoint(tmp_path / "model", model.model)
    write_episodes(tmp_path / "shown.jsonl", [expert(), replace(expert("plain"), variation="plain")])
    given = [
        "--model",
        str(tmp_path / "model"),
        "--split",
        "dev",
        "--rounds",
        "2",
        "--round-starts",
        "1",
        "--group",
        "2",
    ]
    given += ["--imagined-steps", "2", "--count", "2", "--epochs", "60", "--rate", "0.01", "--max-steps", "9"]
    given += ["--demonstrations", str(tmp_path / "shown.jsonl"), "--starts", str(tmp_path / "shown.jsonl")]
    out = tmp_path / "out"
    assert main(["imagined-policy", *given, "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["n"] == 3
    assert results["arms"]["cloned"]["won"]["mean"] == 100
    assert [json.loads(line)["round"] for line in (out / "rounds.jsonl").read_text().splitlines()] == [1, 2]
    assert "imagined - cloned" in capsys.readouterr().out

    (out / "plays.jsonl").write_text("".join((out / "plays.jsonl").read_text().splitlines(keepends=True)[:1]))
    (out / "results.json").unlink()
    assert main(["imagined-policy", *given, "--out", str(out)]) == 0
    again = json.loads((out / "results.json").read_text())
    assert again["arms"] == results["arms"]
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 2
    assert main(["imagined-policy", *given, "--seed", "1", "--out", str(out)]) == 2
    assert "seed must be 0 as in the folder" in capsys.readouterr().err


def test_a_model_without_reward_attention_is_refused(tmp_path, capsys) -> None:
    save_checkpoint(tmp_path / "model", random_model(prediction_heads=True))
    write_episodes(tmp_path / "shown.jsonl", [expert()])
    given = ["--demonstrations", str(tmp_path / "shown.jsonl"), "--starts", str(tmp_path / "shown.jsonl")]
    assert main(["imagined-policy", "--model", str(tmp_path / "model"), *given, "--out", str(tmp_path / "out")]) == 2
    assert "must have reward attention" in capsys.readouterr().err
