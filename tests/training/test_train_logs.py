"""`loopwm train LOGS`: from logs to a model that answers, resumed after a kill; faults are one line."""

from __future__ import annotations

import itertools
import json
import lzma
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

import loopwm
from data_prep.__main__ import main as data_prep
from data_prep.import_logs import split_of
from data_prep.prepare_logs import ensure_dev
from eval.scores.suites import load_suite
from loopwm.__main__ import main
from loopwm.records.episodes import Episode, Step
from loopwm.records.errors import InputError
from loopwm.records.files import read_json
from loopwm.records.template import Context
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer, tokenizer_hash
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
    assert data_prep(["prepare", "--logs", str(logs), "--env", "lamp", "--out", str(tmp_path / "data")]) == 0
    error = capsys.readouterr().err
    assert "warning: contexts snapshot, full, briefed are dropped: the logs lack what they show" in error


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
    assert "stopped early: dev loss has not fallen for 3 tenths of the time" in told
    episodes = run / "data/train.jsonl.xz"
    assert f"next: loopwm serve --model {tmp_path / 'model'} --memory {episodes}\n" in told
    assert episodes.is_file()


@pytest.mark.slow
def test_a_model_that_was_deleted_is_exported_again(run, checkpoint, tmp_path, capsys):
    for _ in range(2):
        FineTuner(fine_tune_config(run / "data", checkpoint, 0), tmp_path, 3 / 60, ticking()).run()
        assert (tmp_path / "model/config.json").is_file()
        shutil.rmtree(tmp_path / "model")
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 3


def test_train_refuses_run_folder_of_other_logs(run, tmp_path, capsys):
    logs = write_logs(tmp_path / "logs.jsonl", [log(number) for number in range(30, 40)])
    assert main(["train", str(logs), "--out", str(run)]) == 2
    assert "must be of the same logs, model and options" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--model", "."], "--model: must be the folder of a LoopWM checkpoint, got ."),
        (["--minutes", "inf"], "--minutes: must be a number > 0, got 'inf'"),
    ],
)
def test_train_refuses_an_option_before_anything_is_written(options, fault, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    write_logs(Path("logs/logs.jsonl"), [log(number) for number in range(20)])
    with pytest.raises(SystemExit) as ended:
        main(["train", "logs", "--out", "run", *options])
    assert ended.value.code == 2
    assert fault in capsys.readouterr().err
    assert [path.name for path in Path().rglob("*")] == ["logs", "logs.jsonl"]


def test_train_out_of_its_own_folder_is_refused_and_loses_nothing(tmp_path, capsys):
    (tmp_path / "run/data").mkdir(parents=True)
    logs = write_logs(tmp_path / "run/data/train.jsonl", [log(number) for number in range(20)])
    before = logs.read_bytes()
    for place, out in ((logs, "run"), (tmp_path, "run")):
        assert main(["train", str(place), "--out", str(tmp_path / out)]) == 2
        assert "--out: must not be inside LOGS, nor LOGS inside of it" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [logs]
    assert logs.read_bytes() == before


def test_a_tokenizer_that_is_damaged_is_named(tmp_path, checkpoint, capsys):
    damaged = shutil.copytree(checkpoint, tmp_path / "model")
    (damaged / "tokenizer.json").write_text("{")
    logs = write_logs(tmp_path / "logs.jsonl", [log(number) for number in range(20)])
    assert main(["train", str(logs), "--out", str(tmp_path / "run"), "--model", str(damaged)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {damaged / 'tokenizer.json'}: EOF while parsing")


def prepare(folder: Path, records: list[dict[str, Any]], *options: str) -> dict[str, Any]:
    logs = write_logs(folder / "logs.jsonl", records)
    assert data_prep(["prepare", "--logs", str(logs), "--env", "lamp", "--out", str(folder / "data"), *options]) == 0
    data: dict[str, Any] = read_json(folder / "data/data.json")
    return data


def test_prepare_drops_texts_that_fit_no_row_and_tells_where_there_are_no_windows(tmp_path, capsys):
    long = [{"observation": "x"}, {"action": "cat", "observation": " ".join(map(str, range(4000)))}]
    data = prepare(tmp_path, [*(log(n, steps=log(n)["steps"][:4]) for n in range(40)), log(99, steps=long)])
    assert sum(split["episodes"] for split in data["sizes"].values()) == 40
    told = capsys.readouterr()
    assert "dropped: 1, one of its texts has over 1024 tokens" in told.out
    for split in ("dev", "test"):
        assert f"warning: no windows of {split}, all its episodes have fewer than 5 steps" in told.err


def with_state(number: int, words: int) -> dict[str, Any]:
    steps = [step | {"look": "a lamp " * words, "inventory": "nothing"} for step in log(number)["steps"]]
    return log(number, steps=steps)


def test_prepare_offers_a_context_only_if_train_and_dev_show_it_in_a_row(tmp_path):
    shares = {"dev": 0.3, "test": 0.0}
    options = ("--dev", "0.3", "--test", "0")
    for words, of_dev, contexts in (
        (1, True, ["observed", "snapshot"]),
        (600, True, ["observed"]),
        (1, False, ["observed"]),
    ):
        folder = tmp_path / f"{words}-{of_dev}"
        folder.mkdir()
        in_train = [split_of(f"Room {number}.", shares, 0) == "train" for number in range(30)]
        records = [with_state(n, words) if of_dev or in_train[n] else log(n) for n in range(30)]
        assert prepare(folder, records, *options)["contexts"] == contexts


def test_prepare_of_long_goals_says_so(tmp_path, capsys):
    logs = write_logs(tmp_path / "logs.jsonl", [log(n, goal=f"{n} lamp " * 504) for n in range(20)])
    assert data_prep(["prepare", "--logs", str(logs), "--env", "lamp", "--out", str(tmp_path / "data")]) == 2
    assert "LOGS: goal, first observation and a step must fit into 1024 tokens" in capsys.readouterr().err


def test_prepare_uses_the_models_tokenizer_and_knows_the_logs_by_their_content(tmp_path, checkpoint, monkeypatch):
    records = [log(number) for number in range(20)]
    frozen = prepare(tmp_path, records, "--tokenizer", str(checkpoint / "tokenizer.json"))
    assert frozen["source"]["tokenizer"] == tokenizer_hash(), "though its file is spelled in another way"
    monkeypatch.chdir(tmp_path)
    again = ["prepare", "--logs", "logs.jsonl", "--env", "lamp", "--out", "data"]
    assert data_prep(again) == 0
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 9000, "content": "<|mine|>"})
    Path("mine.json").write_text(json.dumps(tokenizer))
    assert data_prep([*again, "--tokenizer", "mine.json"]) == 2
    (tmp_path / "other").mkdir()
    own = prepare(tmp_path / "other", records, "--tokenizer", "mine.json")
    assert own["source"]["tokenizer"] == tokenizer_hash(Path("mine.json"))
    assert read_json(tmp_path / "other/data/shards-train/index.json")["tokenizer_hash"] == own["source"]["tokenizer"]


def test_dev_takes_a_goal_that_leaves_enough_to_train_on():
    def episode(goal: str, steps: int) -> Episode:
        step = Step("wait", "x", 0.0, False)
        return Episode("lamp", "t", "a", "train", "logs", goal, (replace(step, action=None), *[step] * steps))

    for names in ("ab", "ba"):  # in one of the orders the hash alone would take the long one
        episodes = {"train": [episode(names[0], 80), episode(names[1], 2)]}
        ensure_dev(episodes)
        assert [one.goal for one in episodes["train"]] == [names[0]]
    with pytest.raises(InputError, match="beside those of test, one for dev, got 1"):
        ensure_dev({"train": [episode("a", 80)]})
