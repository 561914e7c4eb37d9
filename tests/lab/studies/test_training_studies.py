"""The training studies as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main
from lab.studies.study_protocol import load_protocol
from lab.studies.text_protocol import TextProtocol
from lab.studies.training_runs import TrainingRun, best_run, finished, locked, make_run, train
from loopwm.records.errors import InputError
from tests.lab.studies.conftest import Pretend


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, pretend: Pretend) -> None:
    """Training stands still; observations are short."""
    monkeypatch.setattr("lab.studies.training_study.train", pretend)
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 4)


def study(protocol_file: Path, out: Path, *overrides: str) -> int:
    return main(["study", "ablate", "--protocol", str(protocol_file), "--out", str(out), *overrides])


def results(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "results.json").read_text())
    return loaded


def test_a_run_is_trained_as_its_configuration_says_and_not_again(
    trained: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finished(trained)
    assert (trained.config.run.steps, trained.config.run.seed) == (2, 0)
    monkeypatch.setattr("lab.studies.training_runs.subprocess.run", None)
    train(trained)


def test_a_folder_of_another_run_is_refused(trained: TrainingRun, protocol: TextProtocol) -> None:
    other = make_run(protocol, trained.folder.parents[1], "flat", 0, None)
    clash = TrainingRun(other.arm, 0, None, trained.folder, other.base, other.overrides, other.config)
    with pytest.raises(InputError, match="another configuration"):
        train(clash)


def test_a_failed_training_names_the_run(
    protocol: TextProtocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(protocol, tmp_path, "flat", 1, None)
    monkeypatch.setattr("lab.studies.training_runs.sys.executable", "/bin/false")
    with pytest.raises(InputError, match=r"flat/seed-1: training ended with status 1"):
        train(run)


def test_a_training_that_outlives_its_study_is_waited_for(protocol: TextProtocol, tmp_path: Path) -> None:
    """Otherwise the study started again would train in the same folder at the same time."""
    run = make_run(protocol, tmp_path, "plain", 0, None)
    with locked(run) as lock:
        orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    blocked = (
        "import fcntl, sys\ntry:\n    fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n    sys.exit(7)"
    )
    command = [sys.executable, "-c", blocked, str(tmp_path / "plain" / "seed-0.lock")]
    assert subprocess.run(command, check=False).returncode == 7
    orphan.communicate(b"\n")
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.usefixtures("quick")
def test_a_study_writes_tables_plots_and_json_and_finishes_only_once(
    protocol_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert study(protocol_file, out) == 0
    found = results(out)
    assert [arm["arm"] for arm in found["arms"]] == ["plain", "flat", "fed"]
    plain, _, fed = found["arms"]
    assert list(plain["seeds"]) == ["0", "1"]
    assert {"parameters", "flops_per_token", "training_flops_per_token"} <= plain.keys()
    assert len(plain["latents"]["snapshot"][0]["mean"]) == 4
    assert fed["latents"] == {}
    metrics = {(d["arm"], d["metric"], d["horizon"]) for d in found["differences"]}
    assert metrics == {
        (arm, metric, k) for arm in ("flat", "fed") for metric in ("em", "f1", "nats") for k in ("all", 1, 3)
    } - {("fed", "nats", k) for k in ("all", 1, 3)}
    copies = [d for d in found["differences"] if d["arm"] == "flat"]
    assert all(d["difference"] == 0 and not d["counts"] for d in copies)
    report = (out / "report.md").read_text()
    assert report in capsys.readouterr().out
    assert "Is a toy a toy?" in report
    for name in ("plot.png", "latents.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr("eval.models.checkpoint.CheckpointPredictor.predict", None)
    monkeypatch.setattr("eval.models.checkpoint.CheckpointPredictor.begin", None)
    assert study(protocol_file, out) == 0
    assert results(out)["means"] == found["means"]


@pytest.mark.usefixtures("quick")
def test_a_diverged_arm_is_reported_and_not_scored(protocol_file: Path, tmp_path: Path, pretend: Pretend) -> None:
    out = tmp_path / "out"
    run = make_run(load_protocol(TextProtocol, protocol_file), out, "flat", 0, None)
    pretend(run)
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    records[-1]["loss"] = float("nan")
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert study(protocol_file, out, "seeds=[0]", "arms={plain: {}, flat: " + _flat() + "}") == 0
    assert {m["arm"] for m in results(out)["means"]} == {"plain"}
    assert "diverged" in (out / "report.md").read_text()


def _flat() -> str:
    return "{overrides: ['model.overrides={max_loops: 1, mu_rec: 1.0, default_depth: 1}']}"


@pytest.mark.usefixtures("quick")
def test_each_arm_uses_its_best_rate_of_the_first_seed_for_all_seeds(
    protocol_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretend: Pretend
) -> None:
    losses = {("plain", 1e-3): 2.0, ("plain", 2e-3): 1.0, ("flat", 1e-3): 1.0, ("flat", 2e-3): float("nan")}

    def train_(run: TrainingRun) -> None:
        pretend(run)
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        assert run.rate is not None
        lines[-1] = json.dumps(json.loads(lines[-1]) | {"loss": losses[run.arm, run.rate]})
        (run.folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))

    monkeypatch.setattr("lab.studies.training_study.train", train_)
    out = tmp_path / "out"
    assert study(protocol_file, out, "rates=[1e-3, 2e-3]", "latent_horizon=0") == 0
    assert {arm["arm"]: arm["rate"] for arm in results(out)["arms"]} == {"plain": 2e-3, "flat": 1e-3, "fed": 2e-3}
    assert results(out)["arms"][1]["rates_tried"] == {"0.001": 1.0, "0.002": None}
    trained = {str(path.relative_to(out)) for path in out.glob("*/*/seed-?")}
    assert trained == {
        "plain/rate-0.001/seed-0", "plain/rate-0.002/seed-0", "flat/rate-0.001/seed-0", "flat/rate-0.002/seed-0",
        "plain/rate-0.002/seed-1", "flat/rate-0.001/seed-1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("armz={}", "armz"),
        ("arms={}", "arms"),
        ("reference=other", "reference"),
        ("arms.plain.overrides=[run.stepss=3]", "arms.plain: run.stepss"),
        ("arms.plain.overrides=[model.overrides.depht=3]", "arms.plain: model.overrides"),
        ("arms.plain.overrides=[run.log_every=2]", "arms.plain: run.log_every"),
        ("arms.plain.overrides=[run.eval_every=3]", "arms.plain: run.eval_every"),
        ("arms.plain.overrides=['data.dev=[]']", "arms.plain: data.dev"),
        ("arms.plain.decode=never", "arms.plain.decode"),
        ("arms.fed.trained_as=nobody", "arms.fed.trained_as"),
        ("seeds=[0, 0]", "seeds"),
        ("horizons=[3, 1]", "horizons"),
        ("horizons=[9]", "window w0: actions"),
        ("regimes=[full]", "window w0: hidden_state"),
        ("batch_size=0", "batch_size"),
        ("windows=nowhere.jsonl", "nowhere.jsonl"),
        ("base=nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_wrong_protocol_is_one_line_status_two_and_leaves_nothing(
    protocol_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, named: str
) -> None:
    assert study(protocol_file, tmp_path / "out", override) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_a_protocol_key_that_must_be_there_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("question: why?")
    with pytest.raises(InputError, match="arms: missing"):
        load_protocol(TextProtocol, tmp_path / "short.yaml")


@pytest.mark.parametrize("name", ["looping", "looping-reference", "ablate", "deferral"])
def test_committed_protocols_are_read_and_their_arms_differ(name: str) -> None:
    protocol = load_protocol(TextProtocol, Path(f"configs/studies/{name}.yaml"))
    overrides = [arm.overrides for arm in protocol.arms.values() if not arm.trained_as]
    assert len(set(overrides)) == len(overrides)


def test_the_best_run_is_the_one_of_lowest_finite_loss(tmp_path: Path, protocol: TextProtocol) -> None:
    runs = [make_run(protocol, tmp_path, "plain", 0, rate) for rate in (1e-3, 2e-3, 3e-3)]
    for run, loss in zip(runs, (float("nan"), 2.0, 3.0), strict=True):
        run.folder.mkdir(parents=True)
        step = {"step": 1, "kind": "train", "loss": 1.0, "tokens": 1, "tokens_per_s": 1, "state_rms": 1}
        lines = [step | {"mean_depth": 1}, {"step": 1, "kind": "dev", "loss": loss}]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_run(runs).rate == 2e-3
