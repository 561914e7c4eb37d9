"""The halting study as a command, and the policies it compares."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.scores.suites import load_suite
from lab.__main__ import main
from lab.studies.exit_policies import (
    ExitPolicy,
    MeanLoops,
    PolicyPredictor,
    RandomExit,
    random_policy,
    read_mean_loops,
)
from lab.studies.halting_study import Thresholds
from loopwm.core.exit_rules import RULES, Convergence, Fixed, Gate
from loopwm.records.template import window_context
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from tests.test_adding import RULE


@pytest.fixture(scope="module")
def gated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a gate that tells rows and tokens apart."""
    folder = tmp_path_factory.mktemp("gated")
    config = LoopWMConfig.from_pretrained(checkpoint)
    model = LoopWMForCausalLM(
        LoopWMConfig(**{**PRESETS["tiny"], "vocab_size": config.vocab_size, "mu_rec": 2.0}, exit_gate=True)
    )
    model.load_state_dict(LoopWMForCausalLM.from_pretrained(checkpoint).state_dict(), strict=False)
    gate = model.model.core.gate
    assert gate is not None
    with torch.no_grad():
        gate.linear.weight.copy_(torch.randn(gate.linear.weight.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    return folder


@pytest.fixture(autouse=True)
def short_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.studies.exit_policies.LONGEST_OBSERVATION", 6)


def command(model: Path, windows_file: Path, out: Path, *options: str) -> list[str]:
    arguments = ["study", "halting", "--model", str(model), "--windows", str(windows_file), "--context", "observed"]
    return [*arguments, "--horizons", "1,2", "--batch-size", "3", "--out", str(out), *options]


def results(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "results.json").read_text())
    return loaded


def test_recorded_loops_are_those_the_world_takes(gated: Path, windows_file: Path, tmp_path: Path) -> None:
    windows = list(load_suite(str(windows_file)).windows)
    policy = ExitPolicy("gate", "gate", Convergence(0.5, 5), Gate(0.7, 5), 5)
    predictor = PolicyPredictor(gated, policy, tmp_path)
    predictions = predictor.predict(windows, "observed", (1, 3))
    world_model = predictor.world_model
    world = world_model.encode([window_context(window, "observed") for window in windows], 5)
    decoded = []
    for k in (1, 2, 3):
        world = world_model.advance(world, [window["actions"][k - 1] for window in windows], Convergence(0.5, 5))
        decoded += [] if k == 2 else world_model.decode_traced(world, 6, Gate(0.7, 5))
    tokens = [loops for row in decoded for loops in row.loops]
    found = read_mean_loops(tmp_path)
    assert found.advance == pytest.approx(sum(map(sum, world.loops)) / 15)
    assert found.decode == pytest.approx(sum(tokens) / len(tokens))
    assert 1 < found.advance < 5
    assert 1 < found.decode < 5
    assert [p.texts[3] for p in predictions] == [row.text for row in decoded[5:]]


@pytest.mark.parametrize("mean", [1.0, 1.2, 2.5, 4.9, 5.0])
def test_random_exits_have_the_mean_loops_they_are_made_for(mean: float) -> None:
    policy = random_policy(ExitPolicy("gate", "gate", Fixed(5), Fixed(5), 5), MeanLoops(mean, 3.0))
    if isinstance(policy.advance, RandomExit):
        rows = policy.advance.for_pass(0, range(4000)).loops
        assert sum(rows) / len(rows) == pytest.approx(mean, abs=0.08)
    else:
        assert policy.advance == Fixed(round(mean))


def test_rules_are_held_against_the_best_depth_and_random_exits(
    gated: Path, windows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    tried = ("gate=0.5,0.9999", "convergence=0.2")
    arguments = command(gated, windows_file, out, "--rule-limit", "5", "--rules", *tried)
    assert main(arguments) == 0
    found = results(out)
    by_name = {policy["policy"]: policy for policy in found["policies"]}
    rules = ["gate 0.5", "gate 0.9999", "convergence 0.2"]
    assert list(by_name) == [*(f"T={t}" for t in range(1, 5)), *rules, *(f"{rule}, random" for rule in rules)]
    assert found["best_fixed_depth"] == 1  # nothing is right, so all are equal and the smallest is the best
    assert by_name["T=4"]["loops"] == {"advance": 4.0, "decode": 4.0}
    assert by_name["gate 0.5"]["loops"]["decode"] < by_name["gate 0.9999"]["loops"]["decode"]
    assert by_name["gate 0.5"]["against_random"]["reference"] == "gate 0.5, random"
    assert by_name["gate 0.5"]["keeps_quality"]
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "| gate 0.5 |" in (out / "report.md").read_text()
    monkeypatch.setattr(PolicyPredictor, "predict", None)
    assert main(arguments) == 0
    assert results(out)["policies"] == found["policies"]


def test_an_interrupted_policy_counts_no_window_twice(gated: Path, windows_file: Path, tmp_path: Path) -> None:
    options = ["--rules", "gate=0.5", "convergence=0.2", "--rule-limit", "2"]
    assert main(command(gated, windows_file, tmp_path / "out", *options)) == 0
    before = results(tmp_path / "out")
    folder = tmp_path / "out" / "gate-0.5"
    predictions = (folder / "predictions.jsonl").read_bytes()
    (folder / "predictions.jsonl").write_bytes(predictions[:-30])
    with (folder / "loops.jsonl").open("a") as file:
        file.write('{"id": "w')
    assert main(command(gated, windows_file, tmp_path / "out", *options)) == 0
    assert results(tmp_path / "out")["policies"] == before["policies"]


def test_a_checkpoint_without_gate_is_studied_by_convergence_alone(
    checkpoint: Path, windows_file: Path, tmp_path: Path
) -> None:
    assert main(command(checkpoint, windows_file, tmp_path / "out", "--rules", "convergence=0.2")) == 0
    assert {p["family"] for p in results(tmp_path / "out")["policies"]} == {"fixed", "convergence", "random"}
    assert "no exit gate" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rules", "gate=1.5"], "got 1.5"),
        (["--rules", "gate=0"], "tau: must be inside (0, 1), got 0.0"),
        (["--rules", "convergence=-1"], "eps"),
        (["--rules", "gate=x"], "--rules"),
        (["--rules", "magic=1"], "--rules: 'magic'"),
        (["--rules", "random=0.5"], "--rules: 'random'"),
        (["--rules", "trace=1"], "--rules: 'trace'"),
        (["--rule-limit", "99"], "--rule-limit: 99"),
        (["--model", "nowhere"], "--model: 'nowhere'"),
    ],
)
def test_bad_arguments_are_one_line_and_status_two(
    gated: Path, windows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    try:
        status = main(command(gated, windows_file, tmp_path / "out", *options))
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2
    assert named in error
    assert not (tmp_path / "out").exists()


def test_thresholds_of_a_new_rule_give_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        rule = import_module("toy_rule").Second(0.5, 3)
        (policy,) = Thresholds({"second": [0.5]}).policies(3, with_gate=False)
        assert policy.decode == rule
    finally:
        RULES.pop("second")
        sys.modules.pop("toy_rule")


def test_random_exits_depend_on_seed_pass_and_row():
    rule = RandomExit(0.3, 6, seed=4)
    drawn = rule.for_pass(2, range(4000))
    mean = sum(drawn.loops) / 4000
    assert abs(mean - (1 - 0.7**6) / 0.3) < 0.08
    assert rule.for_pass(2, [17, 3]).loops == (drawn.loops[17], drawn.loops[3])
    assert rule.for_pass(3, range(50)).loops != drawn.loops[:50]
    assert RandomExit(0.3, 6, seed=5).for_pass(2, range(50)).loops != drawn.loops[:50]
    assert drawn.limit == 6


def test_impossible_random_exits_are_refused_by_name():
    with pytest.raises(ValueError, match=r"probability: .*got 0\.0"):
        RandomExit(0.0, 4, 0)
    with pytest.raises(ValueError, match="seed: must not be below 0, got -1"):
        RandomExit(0.5, 4, -1)
