"""The example that looks ahead before it acts: what its arms share, what it imagines, what it reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.environments import ENVIRONMENTS
from eval.models.checkpoint import CheckpointPredictor
from lab.__main__ import main
from lab.agents.agents import REFUSALS, RetrievalAgent
from lab.agents.play import play_real
from lab.agents.real_world import Game, RealWorld
from lab.studies import teacher_forcing
from lab.studies.planner import (
    AnyPlan,
    Expected,
    LookAhead,
    MostSimilar,
    PlanningAgent,
    PlanSettings,
    Work,
    best_plan,
    candidate_plans,
    make_arms,
    make_results,
    measure,
)
from lab.studies.teacher_forcing import nll
from loopwm.records.episodes import write_episodes
from loopwm.records.errors import InputError
from loopwm.records.template import Context, Transition
from loopwm.text.world import World, WorldModel
from loopwm.worlds import planning
from loopwm.worlds.local import LocalWorlds
from tests.lab.agents.corridor import Corridor, gold_episode

SETTINGS = PlanSettings("scienceworld", ("ring",), "test", 3, 6, 0, candidates=3, horizon=3, weight=0.5)
START = Context("Ring the bell in room 3.", "You are in room 0.")
FAR = replace(START, history=(Transition("go east", "You are in room 1."), Transition("go east", "You are in room 2.")))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealWorld]:
    monkeypatch.setitem(ENVIRONMENTS, "corridor", Corridor)
    with RealWorld("corridor") as real:
        yield real


@pytest.fixture(scope="module")
def agent() -> RetrievalAgent:
    return RetrievalAgent([gold_episode(2), gold_episode(4)])


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> WorldModel:
    return CheckpointPredictor(checkpoint).world_model


def test_without_look_ahead_it_is_the_retrieval_agent(agent: RetrievalAgent, world: RealWorld) -> None:
    for room in (3, 4, 5):
        game = Game("ring", room)
        planner = PlanningAgent(agent, MostSimilar(), candidates=3)
        assert play_real(planner, world, game, 12) == play_real(agent, world, game, 12)
        assert planner.work.decisions > planner.work.overruled == 0


def test_agreement_of_no_weight_changes_nothing(agent: RetrievalAgent, world: RealWorld, model: WorldModel) -> None:
    game = Game("ring", 5)
    weightless = PlanningAgent(agent, LookAhead(LocalWorlds(model, 2), horizon=2, weight=0.0), candidates=3)
    assert play_real(weightless, world, game, 12) == play_real(agent, world, game, 12)


def test_candidates_do_different_things_and_say_what_they_saw(agent: RetrievalAgent) -> None:
    plans = candidate_plans(agent, FAR, 3)
    assert sorted(str(plan.action) for plan in plans) == ["go east", "ring bell"]
    assert plans[0].similarity >= plans[1].similarity
    (ringing,) = [plan.after for plan in plans if plan.action == "ring bell"]
    assert ringing == (Transition("ring bell", "It rings."),)
    assert len(candidate_plans(agent, FAR, 1)) == 1


def test_where_the_retrieval_agent_stops_there_is_nothing_to_plan(agent: RetrievalAgent) -> None:
    rung = replace(FAR, goal="Ring the bell in room 2.", history=(*FAR.history, Transition("ring bell", "It rings.")))
    assert agent.act(rung) is None
    assert candidate_plans(agent, rung, 3) == []
    assert PlanningAgent(agent, AnyPlan("0"), 3).act(rung) is None


def test_plans_of_a_batch_agree_as_each_alone(agent: RetrievalAgent, model: WorldModel) -> None:
    plans, work = candidate_plans(agent, FAR, 3), Work()
    found = LookAhead(LocalWorlds(model, 2), horizon=3, weight=0.5).agreements(FAR, plans, work)
    lengths = [min(3, len(plan.after)) for plan in plans]
    assert len(set(lengths)) > 1
    assert (work.advances, work.imagined_steps, work.plans) == (max(lengths), sum(lengths), len(plans))
    assert found == pytest.approx([_agreement_alone(model, plan.after[:3]) for plan in plans], abs=1e-5)


def _agreement_alone(model: WorldModel, steps: Sequence[Transition]) -> float:
    world = model.encode([FAR], 2)
    for step in steps:
        world = model.advance(world, [step.action])
    nats, tokens = nll(model, world, [steps[-1].observation])
    refused = sum(math.exp(-float(nll(model, world, [text])[0])) for text in REFUSALS)
    return (1 - refused) * math.exp(-float(nats / tokens))


def test_real_steps_are_added_to_the_world_as_if_all_were_encoded(agent: RetrievalAgent, model: WorldModel) -> None:
    going = LookAhead(LocalWorlds(model, 2), horizon=1, weight=0.5)
    for steps in range(len(FAR.history) + 1):
        context = replace(FAR, history=FAR.history[:steps])
        going._see(context)
        whole = model.encode([context], 2)
        assert (torch.cat([world.latent for world in going._worlds._now]) - whole.latent).abs().max() < 1e-4


def test_what_is_expected_after_a_plan_agrees_more_than_a_refusal(
    agent: RetrievalAgent, model: WorldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(WorldModel):
        """Expects one text, whatever was done."""

        def __init__(self, expected: str) -> None:
            super().__init__(model.model, model.tokenizer)
            self.expected = expected

    def told(model: Told, world: World, observations: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        nats = [0.1 if text == model.expected else 50.0 for text in observations]
        return torch.tensor(nats), torch.full((len(nats),), 10)

    monkeypatch.setattr(teacher_forcing, "nll", told)
    plans = [plan for plan in candidate_plans(agent, FAR, 3) if plan.action == "ring bell"]
    fits, refused, differs = (
        LookAhead(LocalWorlds(Told(text), 2), horizon=2, weight=0.5).agreements(FAR, plans, Work())[0]
        for text in ("It rings.", "Nothing happens.", "You are in room 3.")
    )
    assert fits == pytest.approx(math.exp(-0.01))
    assert differs == pytest.approx(math.exp(-5))
    assert refused < 0.1 * differs


def test_a_plan_is_the_best_by_similarity_and_weighted_agreement() -> None:
    assert best_plan([10.0, 9.0], [0.0, 1.0], weight=0.5) == 1
    assert best_plan([10.0, 9.0], [0.0, 1.0], weight=0.05) == 0
    assert best_plan([0.0, 0.0], [0.5, 0.5], weight=0.5) == 0


def test_the_plan_that_is_expected_to_pay_is_chosen_and_the_most_similar_place_where_none_is(
    agent: RetrievalAgent, model: WorldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, shown = candidate_plans(agent, FAR, 3), []

    def pays(worlds: LocalWorlds, actions: Sequence[Sequence[str]], least: float) -> int | None:
        shown.append(actions)
        return best

    monkeypatch.setattr(planning, "best_plan", pays)
    monkeypatch.setattr(planning, "order_actions", lambda worlds, actions: [len(actions) - 1])
    work = Work()
    for best in (0, None):
        chosen = Expected(LocalWorlds(model, 2), horizon=2).choose(FAR, plans, work)
        assert chosen == (len(plans) - 1 if best is None else best)
    assert shown[0] == [[step.action for step in plan.after[:2]] for plan in plans]
    assert (work.plans, work.imagined_steps) == (2 * len(plans), 2 * sum(map(len, shown[0])))


def test_arms_are_compared_over_the_same_games_and_a_kill_loses_one(
    agent: RetrievalAgent, world: RealWorld, model: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "best_plan", lambda *_: None)  # the model predicts no rewards
    arms = make_arms(lambda: LocalWorlds(model, 2), SETTINGS)
    results = measure(agent, arms, world, SETTINGS, {"model_sha256": "m"}, tmp_path)
    assert results["n"] == 3
    assert list(results["arms"]) == [
        "retrieval", "random", "ordered", "expected-3", "look-ahead-1", "look-ahead-3",
    ]  # fmt: skip
    assert [d["b"] for d in results["differences"]] == [
        "retrieval", "random", "ordered", "expected-3", "look-ahead-1",
    ]  # fmt: skip
    for difference in results["differences"]:
        a, b = (results["arms"][difference[arm]]["score"]["mean"] for arm in "ab")
        assert difference["score"]["mean"] == pytest.approx(a - b)
        a, b = (results["arms"][difference[arm]]["refused"] for arm in "ab")
        assert difference["refused"]["mean"] == pytest.approx(a - b)
    assert results["arms"]["retrieval"]["plans"] == 0 < results["arms"]["look-ahead-3"]["plans"]

    plays, report = tmp_path / "plays.jsonl", (tmp_path / "report.md").read_text()
    lines = plays.read_text().splitlines(keepends=True)
    plays.write_text("".join(lines[:2]) + lines[2][:40])
    again = measure(agent, arms, world, SETTINGS, {"model_sha256": "m"}, tmp_path)
    assert plays.read_text().splitlines(keepends=True)[:2] == lines[:2]
    assert again["differences"] == results["differences"]
    assert [line["game"] for line in map(json.loads, plays.open())] == [json.loads(line)["game"] for line in lines]
    assert "look-ahead-3 - retrieval" in report
    with pytest.raises(InputError, match="model_sha256 must be 'm'"):
        measure(agent, arms, world, SETTINGS, {"model_sha256": "other"}, tmp_path)


def test_a_game_that_ends_below_zero_is_lost() -> None:
    def play(score: int) -> dict[str, Any]:
        return {"score": score, "success": score == 100, "refused": 0, "actions": ["wave"], "work": asdict(Work(1))}

    plays = [
        {"task": "toy", "retrieval": play(was), "ordered": play(now)} for was, now in ((-100, 0), (-100, 100), (50, 50))
    ]
    results = make_results(plays, ["retrieval", "ordered"], {})
    assert results["arms"]["retrieval"]["lost"]["mean"] == pytest.approx(100 * 2 / 3)
    assert results["differences"][0]["lost"]["mean"] == pytest.approx(-100 * 2 / 3)
    assert results["differences"][0]["score"]["mean"] == pytest.approx(100 / 3)


def test_plan_plays_the_environment_of_its_option(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "alfworld", Corridor)
    train, out = tmp_path / "train.jsonl", tmp_path / "out"
    write_episodes(train, [replace(gold_episode(2), env="alfworld")])
    options = ["--env", "alfworld", "--arms", "retrieval", "--episodes", "2", "--model", str(checkpoint)]
    assert main(["plan", "--train-episodes", str(train), "--out", str(out), *options]) == 0
    games = [json.loads(line)["game"] for line in (out / "plays.jsonl").open()]
    assert sorted(name.split("/")[0] for name in games) == ["ring", "ring-again"]
    assert (out / "report.md").read_text().startswith("# Look-ahead in alfworld\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--horizon", "1"], "--horizon"),
        (["--weight", "-1"], "--weight"),
        (["--candidates", "none"], "--candidates"),
        (["--train-episodes", "nowhere"], "nowhere"),
        (["--model", "nowhere"], "--model"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["plan", "--train-episodes", str(tmp_path / "none"), "--out", str(tmp_path / "out"), *arguments])
    except SystemExit as exit_:
        status = int(str(exit_.code))
    error = capsys.readouterr().err.splitlines()[-1:]
    assert status == 2
    assert error[0].startswith("error: ")
    assert named in error[0]
    assert not (tmp_path / "out").exists()
