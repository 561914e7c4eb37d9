"""Several processes train as one, with each of accelerate's configurations; runs survive the death of a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.training.__main__ import main

pytestmark = pytest.mark.slow

STEPS = "run.steps=20"
CONFIGS = Path("configs/accelerate")
PATIENCE = 600.0
"""Seconds until a process that should act has hung."""


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record.pop("kind") == kind]


@pytest.fixture(scope="module")
def alone(config_file: Path, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert main(["--config", str(config_file), "--out", str(folder), STEPS]) == 0
    return folder


def launch(config: str, config_file: Path, folder: Path, *overrides: str, machine: int = 0) -> subprocess.Popen[str]:
    """Start a small twin of a configuration: two processes, of two machines if it has several."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    command += ["--num_processes", "2", "--machine_rank", str(machine)]
    command += ["--main_process_port", str(PORT)] if config == "multi-node" else []
    command += ["-m", "loopwm.training", "--config", str(config_file), "--out", str(folder), *(overrides or (STEPS,))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PORT = free_port()


def check_equal(folder: Path, alone: Path) -> None:
    """Compare losses and gradient norms: Muon and Adam hide the scale of a gradient from the losses."""
    for name in ("loss", "grad_norm"):
        several, one = ([record[name] for record in records(each)] for each in (folder, alone))
        assert len(several) == len(one) == 20
        assert several == pytest.approx(one, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.iterdir()))
def test_two_processes_train_as_one(config: str, config_file: Path, alone: Path, tmp_path: Path) -> None:
    machines = range(2 if config == "multi-node" else 1)
    runs = [launch(config, config_file, tmp_path / "run", machine=machine) for machine in machines]
    errors = [run.communicate(timeout=PATIENCE)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), errors
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["processes"] == 2
    check_equal(tmp_path / "run", alone)
    for two, one in zip(records(tmp_path / "run", "dev"), records(alone, "dev"), strict=True):
        assert two.keys() == one.keys() >= {"exact_k0/scienceworld/gold", "exact_k0/scienceworld/random"}
        assert two == pytest.approx(one, rel=1e-3, abs=1e-3)
    exported, expected = (load_checkpoint(folder / "model")[0].state_dict() for folder in (tmp_path / "run", alone))
    for name, weight in expected.items():  # in bfloat16, where a last bit is 2^-8
        torch.testing.assert_close(exported[name], weight, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("config", "moment"), [("ddp", "a step"), ("fsdp2", "a save")])
def test_run_of_a_killed_rank_resumes(config: str, moment: str, config_file: Path, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"
    run = launch(config, config_file, folder)
    wait_for(lambda: (checkpoints / "step-00000006").exists(), run)
    if moment == "a save":
        wait_for(lambda: any(checkpoints.glob("tmp-*")), run)
    kill_rank(run)
    assert run.wait(PATIENCE) != 0  # the launcher ends the other rank
    assert not (folder / "model").exists()
    (checkpoints / "tmp-step-00000018").mkdir(exist_ok=True)  # half a checkpoint, whatever the moment of the kill
    (checkpoints / "tmp-step-00000018" / "__0_0.distcp").write_bytes(b"half")
    again = launch(config, config_file, folder)
    assert again.wait(PATIENCE) == 0
    check_equal(folder, alone)
    assert not list(checkpoints.glob("tmp-*"))


def wait_for(condition: Any, run: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert run.poll() is None
        assert time.monotonic() < end
        time.sleep(0.001)


def kill_rank(run: subprocess.Popen[str]) -> None:
    """Kill the second process that the launcher started."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


@pytest.mark.parametrize("override", ["batch.micro_batches=3", "optimizer.average=0.9"])
def test_run_that_processes_cannot_share_is_refused(override: str, config_file: Path, tmp_path: Path) -> None:
    run = launch("fsdp2", config_file, tmp_path / "run", override)
    error = run.communicate(timeout=PATIENCE)[1]
    assert run.returncode != 0
    assert f"error: {override.partition('=')[0]}: " in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
