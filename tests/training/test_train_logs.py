"""`loopwm train LOGS`: from logs to a model that answers, resumed after a kill; faults are one line."""

from __future__ import annotations

import itertools
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

import loopwm
from eval.scores.suites import load_suite
from loopwm.__main__ import main
from loopwm.records.errors import InputError
from loopwm.records.files import read_json
from loopwm.records.template import Context
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.fine_tune import FineTuner, fine_tune_config
from loopwm.text.training.program import export_model
from loopwm.trainer.optimizer import learning_rate_factor


def log(number: int, **changed: Any) -> dict[str, Any]:
    """A lamp is switched on and off; every log has a goal of its own."""
    rng, steps = random.Random(number), [{"observation": "The lamp is off."}]
    for _ in range(8):
        state = rng.choice(["on", "off"])
        steps.append({"action": f"switch {state}", "observation": f"The lamp is {state}.", "reward": 1})
    return {"goal": f"Room {number}.", "steps": steps, **changed}


def write_logs(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def other_precision() -> Iterator[None]:
    """Let runs of this file choose a precision: accelerate keeps that of a process's first run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, other_precision) -> Path:
    tokenizer = load_tokenizer()
    tiny = {**PRESETS["tiny"], "prediction_heads": True}
    model = LoopWMForCausalLM(LoopWMConfig(vocab_size=len(tokenizer), context_tokens=512, **tiny))
    folder = tmp_path_factory.mktemp("tiny") / "model"
    export_model(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoint) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    logs = write_logs(folder / "logs.jsonl", [log(number) for number in range(20)])
    options = ["--environment", "lamp", "--minutes", "0.05", "--test", "0.2", "--model", str(checkpoint)]
    assert main(["train", str(logs), "--out", str(folder / "run"), *options]) == 0
    return folder / "run"


@pytest.mark.slow
def test_train_of_logs_exports_model_that_answers(run):
    worlds = loopwm.load(run / "model", "cpu")
    worlds.begin([Context("Room 3.", "The lamp is off.")])
    (imagined,) = worlds.step(["switch on"])
    assert isinstance(imagined.observation, str)
    assert "fine-tuned" in (run / "model/README.md").read_text()


def test_train_of_logs_keeps_seeds_apart_and_cuts_windows(run):
    suites = [load_suite(str(run / f"data/{split}-windows.jsonl.gz")) for split in ("dev", "test")]
    splits = {window["goal"]: window["split"] for suite in suites for window in suite.windows}
    assert set(splits.values()) == {"dev", "test"}
    assert read_json(run / "data/data.json")["sizes"]["train"]["goals"] == 20 - len(splits)


def test_train_of_logs_warns_of_contexts_without_texts(tmp_path, checkpoint, capsys):
    logs = write_logs(tmp_path / "logs.jsonl", [log(number) for number in range(10)])
    assert main(["train", str(logs), "--out", str(tmp_path / "run"), "--minutes", "0", "--model", str(checkpoint)]) == 2
    error = capsys.readouterr().err
    assert "warning: contexts snapshot, full, briefed are dropped: the logs lack what they show" in error
    assert "error: --minutes: must be above 0, got 0.0" in error


def ticking() -> Any:
    """A clock on which every reading takes a second."""
    return itertools.count().__next__


@pytest.mark.slow
def test_fine_tuning_resumes_time_and_step_after_kill(run, checkpoint, tmp_path):
    config = fine_tune_config(run / "data", checkpoint, 0)
    killed = FineTuner(config, tmp_path, 10 / 60, ticking())
    killed._finished = lambda: killed.step == 4  # type: ignore[method-assign]
    killed._export = lambda: None  # type: ignore[method-assign]
    killed.run()
    resumed = FineTuner(config, tmp_path, 10 / 60, ticking())
    assert (resumed.step, resumed.seconds) == (4, killed.seconds)
    resumed.run()
    assert (resumed.step, resumed.seconds) == (10, 10)
    assert learning_rate_factor(resumed.step, resumed._done(), config.optimizer) == 0
    continued = FineTuner(config, tmp_path, 20 / 60, ticking())
    continued.run()
    dev = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"dev"' in line
    ]
    assert dev == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20]


@pytest.mark.slow
def test_fine_tuning_stops_if_dev_does_not_improve(run, checkpoint, tmp_path, capsys, caplog):
    tuner = FineTuner(fine_tune_config(run / "data", checkpoint, 0), tmp_path, 20 / 60, ticking())
    losses = iter([3.0, 2.0, 2.5, 2.5, 2.5])
    tuner.evaluate = lambda: {"loss": next(losses)}  # type: ignore[method-assign]
    tuner.run()
    assert tuner.step == 8  # two steps a part of the time
    told = capsys.readouterr().out
    assert "shared tensor" not in caplog.text
    assert "dev loss 3.00 -> 2.00" in told
    episodes = run / "data/train.jsonl.xz"
    assert f"next: loopwm serve --model {tmp_path / 'model'} --memory {episodes}\n" in told
    assert episodes.is_file()


def test_train_refuses_run_folder_of_other_logs(run, tmp_path, capsys):
    logs = write_logs(tmp_path / "logs.jsonl", [log(number) for number in range(30, 40)])
    assert main(["train", str(logs), "--out", str(run)]) == 2
    assert "must be of the same logs and options" in capsys.readouterr().err


def broken_xz(path: Path) -> str:
    content = lzma.compress("".join(json.dumps(log(n)) + "\n" for n in range(20)).encode())
    path.with_suffix(".jsonl.xz").write_bytes(content[:-40])
    return str(path.with_suffix(".jsonl.xz"))


@pytest.mark.parametrize(
    ("write", "fault"),
    [
        (broken_xz, "logs.jsonl.xz: line "),
        (lambda path: str(write_logs(path, [log(0), {"goal": "x"}])), "logs.jsonl: line 2: steps: must be list"),
        (lambda path: str(write_logs(path, [log(0)] * 8)), "LOGS: must have at least 2 goals (or seeds)"),
    ],
)
def test_train_of_bad_logs_is_refused_in_one_line(write, fault, tmp_path, capsys):
    logs = write(tmp_path / "logs.jsonl")
    assert main(["train", logs, "--out", str(tmp_path / "run"), "--test", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert fault in error
    assert error.count("\n") == 1


def test_fine_tune_config_refuses_folder_without_checkpoint(run, tmp_path):
    with pytest.raises(InputError, match="--model: must be the folder of a LoopWM checkpoint"):
        fine_tune_config(run / "data", tmp_path, 0)
