"""The looping study: its measures on worlds that are right and wrong, its bars, and a run through the front door."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab.__main__ import main
from lab.pixels import looping_study
from lab.pixels.looping_study import LoopingProtocol, compare, held_out, mean_returns, right_shares, verdict
from lab.studies.differences import SeedDifference
from lab.studies.study_protocol import load_protocol
from loopwm.pixel.imagined import Imagined
from loopwm.records.errors import InputError

PROTOCOL = Path("configs/studies/looping-catch.yaml")


@pytest.fixture
def protocol(monkeypatch) -> LoopingProtocol:
    monkeypatch.setattr(looping_study, "PLAYED", 60)
    return load_protocol(LoopingProtocol, PROTOCOL, ["rollouts=50"])


@dataclass
class Rules:
    """Catch itself as a world, in which the frame is the state; `deaf` ignores actions, `short` ends at every step."""

    deaf: bool = False
    short: bool = False

    def start(self, obs: Any, action: Any, first: Any, generator: Any) -> Any:
        return obs[:, -1]

    def step(self, state: Any, action: Any, generator: Any) -> Any:
        frames, ends = [], []
        for frame, move in zip(state, action, strict=True):
            row, ball = frame[:-1, :, 0].max(1).values.argmax(), frame[:-1, :, 0].max(0).values.argmax()
            paddle = frame[-1, :, 0].argmax() + (0 if self.deaf else int(move) - 1)
            after = torch.zeros_like(frame)
            after[-1, paddle.clamp(0, 4)] = after[min(int(row) + 1, 9), ball] = 255
            frames.append(after)
            ends.append(self.short or int(row) == 8)
        return Imagined(torch.zeros(len(action)), torch.tensor(ends), torch.stack(frames))

    def show(self, state: Any) -> Any:
        return state


def test_shares_of_right_deaf_and_short_worlds(protocol):
    play = held_out(protocol)
    assert right_shares(protocol, Rules(), play).tolist() == [1.0] * len(right_shares(protocol, Rules(), play))
    deaf = right_shares(protocol, Rules(deaf=True), play)
    assert 0.05 < deaf.mean() < 0.7
    assert right_shares(replace(protocol, column="cells"), Rules(deaf=True), play).mean() > 0.9
    assert right_shares(protocol, Rules(short=True), play).max() == 0


def test_returns_count_every_episode_of_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(looping_study, "LAST", 3)
    records = [
        {"interactions": 10, "episodes": 2, "return": -1.0},
        {"interactions": 20, "episodes": 2},
        {"interactions": 30, "episodes": 5, "return": 1.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    interactions, returns = mean_returns(path)
    assert interactions.tolist() == [30, 30, 30]
    assert returns == pytest.approx([-1 / 3, 1 / 3, 1])
    monkeypatch.setattr(looping_study, "LAST", 6)
    with pytest.raises(InputError, match=r"must have 6 episodes, got 5"):
        mean_returns(path)


def difference(value: float, counts: bool) -> SeedDifference:
    return SeedDifference(value, value - 0.1, value + 0.1, (value,), counts)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1.0, True), (0.5, True)], "the loop pays"),
        ([(1.0, True), (0.5, False)], "not resolved"),
        ([(1.0, True), (-0.5, False)], "not resolved"),
        ([(1.0, True), (-0.5, True)], "the loop does not pay"),
    ],
)
def test_verdict_follows_the_bars(pairs, expected):
    assert verdict([difference(*pair) for pair in pairs]) == expected


def test_comparison_is_the_reference_less_each_arm(protocol):
    rows = {"looped": 0.9, "once": 0.7, "equal-flops": 0.95}
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (3, 40))
    measured = {arm: [{"right": share + noise[seed]} for seed in range(3)] for arm, share in rows.items()}
    by_arm = {d.arm: d.difference for d in compare(protocol, measured)}
    assert by_arm == {"once": pytest.approx(0.2), "equal-flops": pytest.approx(-0.05)}


def test_held_out_seed_of_a_run_is_refused():
    with pytest.raises(InputError, match=r"seed: must not be a run's"):
        load_protocol(LoopingProtocol, PROTOCOL, ["seed=1"])


def test_complete_with_an_edited_base_measures_again(protocol, tmp_path, monkeypatch):
    base = tmp_path / "base.yaml"
    base.write_text(Path(protocol.base).read_text())
    protocol, measured = replace(protocol, base=str(base)), iter("abc")
    monkeypatch.setattr(looping_study.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr(looping_study, "measure", lambda *_: {"right": next(measured)})

    def right() -> str:
        return looping_study.complete(protocol, "looped", 1, tmp_path / "run", None)["right"]

    (tmp_path / "run").mkdir()
    assert [right(), right()] == ["a", "a"]
    base.write_text(base.read_text().replace("entropy_coef: 3.0e-3", "entropy_coef: 1.0e-3"))
    assert right() == "b"


@pytest.mark.slow
def test_study_trains_measures_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(looping_study, "PLAYED", 60)
    monkeypatch.setattr(looping_study, "LAST", 10)
    command = ["pixels", "looping", "--out", str(tmp_path / "study"), "seeds=[0]", "rollouts=20"]
    command.append("shared=[real.total=320,imagination.updates=0,world.updates=1,model.dim=32]")
    assert main(command) == 0
    results = json.loads((tmp_path / "study/results.json").read_text())
    flops = {arm: runs[0]["flops"] for arm, runs in results["arms"].items()}
    assert flops["looped"] == flops["equal-flops"] > flops["once"]
    parameters = {arm: runs[0]["parameters"] for arm, runs in results["arms"].items()}
    assert parameters["looped"] == parameters["once"] < parameters["equal-flops"]
    assert f"Verdict: {results['verdict']}." in capsys.readouterr().out
    monkeypatch.setattr(looping_study, "measure", lambda *_: pytest.fail("measured again"))
    assert main(command) == 0
