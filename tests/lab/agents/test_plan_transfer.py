"""The consistency ratio: its arithmetic, agents, plays and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.environments import ENVIRONMENTS
from data_prep.environments.base import SimulatorError
from data_prep.environments.scienceworld.environment import ScienceWorld
from eval.models.base import Copy
from eval.models.checkpoint import CheckpointPredictor
from eval.models.fewshot import Message
from lab.agents.agents import ChatAgent, RetrievalAgent
from lab.agents.imagination import PredictorWorlds, make_imagination
from lab.agents.plan_transfer import ConsistencySettings, consistency_ratio, make_results, measure, render_consistency
from lab.agents.play import Play, play_imagined, play_real, replay, won, won_as_imagined
from lab.agents.real_world import Game, RealWorld
from lab.main import main
from loopwm.records.episodes import Episode, Step, write_episodes
from loopwm.records.errors import InputError
from loopwm.records.template import Context, Transition
from tests.lab.agents.corridor import Corridor, Dream, FalseDream, JudgedDream, TrueDream, dreaming, gold_episode

SETTINGS = ConsistencySettings("model", "retrieval-agent", "corridor", ("ring",), "test", 3, "observed", 12, 0, 2)
START = Context("Ring the bell in room 3.", "You are in room 0.")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealWorld]:
    monkeypatch.setitem(ENVIRONMENTS, "corridor", Corridor)
    with RealWorld("corridor") as real:
        yield real


@pytest.fixture(scope="module")
def agent() -> RetrievalAgent:
    return RetrievalAgent([gold_episode(2)])


def play(success: bool, score: float = 0.0, observations: Sequence[str] = ("a",)) -> dict[str, Any]:
    texts = list(observations)
    return {"success": success, "score": score, "actions": ["x"] * len(texts), "observations": texts}


def test_the_ratio_is_that_of_the_rates() -> None:
    real, w2r = np.array([1.0, 1, 1, 0, 1, 0, 1, 1]), np.array([1.0, 0, 1, 0, 1, 0, 0, 0])
    ratio = consistency_ratio(real, w2r)
    assert ratio.value == pytest.approx(0.5)
    assert ratio.low is not None
    assert ratio.high is not None
    assert 0 <= ratio.low < 0.5 < ratio.high <= 1
    assert consistency_ratio(np.array([1.0, 0]), np.array([1.0, 1])).value == 2


def test_equal_outcomes_have_ratio_one_without_spread() -> None:
    outcomes = np.array([1.0, 0, 1, 1, 0, 0, 1, 0] * 4)
    ratio = consistency_ratio(outcomes, outcomes)
    assert (ratio.value, ratio.low, ratio.high, ratio.undefined) == (1, 1, 1, 0)


def test_without_real_success_the_ratio_is_undefined_and_says_so() -> None:
    ratio = consistency_ratio(np.zeros(3), np.array([1.0, 0, 0]))
    assert (ratio.value, ratio.low, ratio.high, ratio.undefined) == (None, None, None, 1)
    record = {"game": "g", "task": "t", "real": play(False), "wm": play(False), "w2r": play(True, 100)}
    spec = {"model": "m", "agent": "a", "env": "e", "split": "s", "context": "observed", "max_steps": 5}
    report = render_consistency(make_results(spec, [record], judges=False))
    assert "undefined (Real = 0)" in report
    assert "nan" not in report


def test_resamples_without_real_success_are_left_out_and_counted() -> None:
    ratio = consistency_ratio(np.array([1.0, 0, 0, 0]), np.array([1.0, 0, 0, 0]))
    assert (ratio.value, ratio.low, ratio.high) == (1, 1, 1)
    assert ratio.undefined == pytest.approx(0.75**4, abs=0.05)


def test_negative_scores_count_as_zero_and_matches_are_over_replayed_steps() -> None:
    one = {"task": "t", "real": play(True, 100), "wm": play(True, 0, ["a", "b", "c"]), "w2r": play(False, -100, "ax")}
    two = {"task": "t", "real": play(False, 50), "wm": play(True, 0, ["a"]), "w2r": play(True, 100, "a")}
    spec = {"model": "m", "agent": "a", "env": "e", "split": "s", "context": "observed", "max_steps": 5}
    row = make_results(spec, [one, two], judges=False)["rows"][0]
    assert (row["real"]["score"]["mean"], row["w2r"]["score"]["mean"]) == (75, 50)
    assert row["replay_em"]["mean"] == 0.75


def test_the_agent_does_what_the_most_similar_place_did(agent: RetrievalAgent) -> None:
    assert agent.act(START) == "go east"
    there = replace(START, history=(Transition("go east", "You are in room 2."),), goal="Ring the bell in room 2.")
    assert agent.act(there) == "ring bell"
    assert agent.act(replace(there, history=(*there.history, Transition("ring bell", "It rings.")))) is None


def test_after_a_refusal_the_agent_neither_insists_nor_stops(agent: RetrievalAgent) -> None:
    refused = Transition("ring bell", "Nothing happens.")
    there = Context(
        "Ring the bell in room 2.", "You are in room 0.", (Transition("go east", "You are in room 2."), refused)
    )
    assert agent.act(there) == "go east"


def test_the_agent_does_not_repeat_what_it_did_in_the_same_place(agent: RetrievalAgent) -> None:
    there = Transition("go east", "You are in room 1.")
    taken = agent.act(replace(START, history=(there,)))
    assert taken is not None
    back_again = (there, Transition(taken, "You are in room 2."), there)
    assert agent.act(replace(START, history=back_again)) not in (taken, None)


def test_agents_learn_from_successful_experts_of_train_alone() -> None:
    lost = replace(gold_episode(2), steps=gold_episode(2).steps[:-1])
    with pytest.raises(InputError, match="must hold a successful episode of an expert"):
        RetrievalAgent([lost, gold_episode(2, policy="random")])
    with pytest.raises(InputError, match="split: 'test'"):
        RetrievalAgent([gold_episode(2), gold_episode(1, split="test")])


def test_a_chat_agent_is_shown_the_nearest_example_and_can_stop() -> None:
    class Chat:
        def __init__(self, reply: str) -> None:
            self.reply = reply

        def complete(self, messages: Sequence[Message]) -> str:
            self.asked = messages
            return self.reply

    chat = Chat(" go east \nbecause")
    seen = replace(START, history=(Transition("go east", "You are in room 1."),), goal="Ring the bell in room 4.")
    chat_agent = ChatAgent(chat, [gold_episode(2), gold_episode(4)])
    assert chat_agent.act(seen) == "go east"
    first, *turns = chat.asked
    assert "Goal: Ring the bell in room 4.\nYou are in room 0.\n> go east" in first["content"]
    assert first["content"].endswith("Goal: Ring the bell in room 4.\n\nYou are in room 0.")
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("assistant", "go east"),
        ("user", "You are in room 1."),
    ]
    for reply in ("finished", "Finished.", ""):
        assert ChatAgent(Chat(reply), []).act(seen) is None


def test_in_a_true_dream_the_agent_plays_as_in_the_real_world(agent: RetrievalAgent, world: RealWorld) -> None:
    games = [Game("ring", room) for room in (3, 4, 5)]
    starts = [world.start(game, "observed") for game in games]
    dreams = play_imagined(agent, TrueDream(), False, starts, 12)
    for game, dream in zip(games, dreams, strict=True):
        real = play_real(agent, world, game, 12)
        assert (dream.actions[: len(real.actions)], real.done) == (real.actions, True)
        assert replay(world, game, dream.actions).observations == real.observations


def test_success_in_a_dream_is_by_heads_where_there_are_any(agent: RetrievalAgent) -> None:
    (judged,) = play_imagined(agent, JudgedDream(), True, [START], 12)
    assert (judged.done, judged.stopped, judged.score, won_as_imagined(judged)) == (True, False, 100, True)
    (spoken,) = play_imagined(agent, TrueDream(), False, [START], 12)
    assert (spoken.done, spoken.stopped, spoken.score, won_as_imagined(spoken)) == (False, True, None, True)
    assert not won_as_imagined(Play(score=20.0, done=True))
    assert not won_as_imagined(Play(score=100.0, stopped=True))
    assert not won(Play(score=100.0))
    assert not won(Play(score=50.0, done=True))


def test_plays_end_at_the_limit(agent: RetrievalAgent, world: RealWorld) -> None:
    assert len(play_real(agent, world, Game("ring", 5), 2).actions) == 2
    (dream,) = play_imagined(agent, TrueDream(), False, [START], 2)
    assert (len(dream.actions), dream.over, won_as_imagined(dream)) == (2, False, False)


def test_a_replay_ends_where_the_world_does(world: RealWorld) -> None:
    assert replay(world, Game("ring", 1), ["go east", "ring bell", "go east"]).actions == ["go east", "ring bell"]


def test_a_false_dream_is_found_out(agent: RetrievalAgent, world: RealWorld, tmp_path: Path) -> None:
    true = measure(agent, Copy(), dreaming(TrueDream), world, SETTINGS, tmp_path / "true")["rows"][0]
    assert (true["real"]["success"]["mean"], true["consistency_ratio"]["value"]) == (1, 1)
    assert true["replay_em"]["mean"] == 1
    false = measure(agent, Copy(), dreaming(FalseDream), world, SETTINGS, tmp_path / "false")["rows"][0]
    assert (false["wm"]["success"]["mean"], false["consistency_ratio"]["value"]) == (1, 0)
    assert false["replay_em"]["mean"] < 1


def test_a_stopped_measurement_goes_on_to_the_same_results(
    agent: RetrievalAgent, world: RealWorld, tmp_path: Path
) -> None:
    class Interrupted(TrueDream):
        calls = 0

        def step(self, *question: Any) -> Any:
            Interrupted.calls += 1
            if Interrupted.calls == 14:
                raise KeyboardInterrupt
            return super().step(*question)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = measure(agent, Copy(), dreaming(TrueDream), world, SETTINGS, whole)
    with pytest.raises(KeyboardInterrupt):
        measure(agent, Copy(), dreaming(Interrupted), world, SETTINGS, killed)
    assert 0 < len((killed / "plays.jsonl").read_text().splitlines()) < 3
    torn = (killed / "plays.jsonl").read_bytes()
    (killed / "plays.jsonl").write_bytes(torn[:-20])
    assert measure(agent, Copy(), dreaming(TrueDream), world, SETTINGS, killed)["rows"] == expected["rows"]
    assert measure(agent, Copy(), dreaming(Unasked), world, SETTINGS, killed)["rows"] == expected["rows"]


class Unasked(Dream):
    def step(self, *question: Any) -> Any:
        raise AssertionError("everything is played")


def test_games_are_drawn_in_turn_without_repeats(world: RealWorld) -> None:
    games = world.choose_games([], "test", 6, seed=0)
    assert [game.task for game in games] == ["ring", "ring-again"] * 3
    assert len({game.name for game in games}) == 6
    assert world.choose_games([], "test", 4, seed=0) == games[:4]
    assert any(world.choose_games([], "test", 6, seed=seed) != games for seed in range(1, 5))


def test_a_simulator_that_breaks_down_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragile(Corridor):
        left = 1

        def step(self, action: str) -> Step:
            if Fragile.left:
                Fragile.left -= 1
                raise SimulatorError("broken")
            return super().step(action)

    monkeypatch.setitem(ENVIRONMENTS, "corridor", Fragile)
    game = Game("ring", 1)
    with RealWorld("corridor") as real:
        assert won(real.robustly(game, lambda: replay(real, game, ["go east", "ring bell"])))
        Fragile.left = 2
        with pytest.raises(InputError, match="corridor: ring/1: broken"):
            real.robustly(game, lambda: replay(real, game, ["go east"]))


def test_a_checkpoint_imagines_as_it_predicts_the_next_observation(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 6)
    predictor = CheckpointPredictor(checkpoint)
    seen = replace(START, history=(Transition("go east", "You are in room 1."),))
    local = make_imagination(predictor, str(checkpoint), "observed").worlds("corridor")
    steps = []
    for worlds in (local, PredictorWorlds(predictor, "corridor")):
        worlds.begin([START, seen])
        steps.append([step.observation for step in worlds.step(["go east", "ring bell"])])
    assert steps[0] == steps[1]
    assert all(step.reward is None for step in local.step(["go east", "ring bell"]))


def command(tmp_path: Path, *options: str, episodes: Sequence[Episode] = ()) -> list[str]:
    path = tmp_path / "train.jsonl"
    write_episodes(path, episodes or [gold_episode(2)])
    return [
        "plan-transfer", "--env", "corridor", "--model", "copy", "--episodes", "2", "--context", "observed",
        "--agent-episodes", str(path), "--out", str(tmp_path / "out"), *options,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "fly"], "--tasks: must be some of ring, ring-again, got 'fly'"),
        (["--split", "dev"], "--split: must be one of train, test, got 'dev'"),
        (["--episodes", "99"], "--episodes: must be at most 6, the variations in split 'test', got 99"),
        (["--agent", "me"], "--agent: must be retrieval-agent or openai:URL#MODEL, got 'me'"),
        (["--env", "moon"], "--env: environment: must be one of "),
        (["--context", "snapshot"], "--context: must be 'observed' for 'copy', which imagines step by step"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], message: str, world: RealWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = [replace(gold_episode(2), env=env) for env in ("corridor", "moon")]
    assert main(command(tmp_path, *options, episodes=train)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert line.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()


def test_another_run_in_the_folder_is_refused(
    world: RealWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path)) == 0
    assert main(command(tmp_path, "--max-steps", "5")) == 2
    assert "max_steps must be 40 as in the folder, got 5" in capsys.readouterr().err


def test_scienceworld_is_played_imagined_and_replayed(
    simulator: ScienceWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the gold path of the very game to learn from, the agent wins it; `copy` shows it the first room for ever."""
    task, variation = "lifespan-longest-lived", 62
    monkeypatch.setitem(ENVIRONMENTS, "scienceworld", lambda: simulator)
    monkeypatch.setattr(simulator, "close", lambda: None)
    gold = simulator.gold_actions(task, variation)
    steps = [simulator.reset(task, variation), *map(simulator.step, gold)]
    episode = Episode("scienceworld", task, variation, "train", "gold", simulator.goal(), tuple(steps))
    options = ["--env", "scienceworld", "--tasks", task, "--split", "dev", "--episodes", "1"]
    monkeypatch.setattr(simulator, "variations", lambda *_: [variation])
    assert main(command(tmp_path, *options, episodes=[episode])) == 0
    row = json.loads((tmp_path / "out" / "results.json").read_text())["rows"][0]
    assert row["real"]["success"]["mean"] == 1
    assert row["real"]["score"]["mean"] == 100
    assert row["consistency_ratio"]["value"] in (0, 1)
    (line,) = (tmp_path / "out" / "plays.jsonl").read_text().splitlines()
    real = json.loads(line)["real"]["actions"]
    assert real == gold[: len(real)]
    assert "| lifespan-longest-lived | 1 | 100.0" in capsys.readouterr().out
