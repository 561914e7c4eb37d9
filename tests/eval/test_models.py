"""A checkpoint as a predictor, with a tiny random model."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from pathlib import Path

import pytest

from eval.__main__ import main
from eval.models.checkpoint import CheckpointPredictor
from eval.models.options import add_model_arguments
from loopwm.records.template import window_context
from loopwm.text.world import WorldModel, tokens_per_byte
from tests.fixtures.models import random_model, save_checkpoint
from tests.fixtures.windows import MakeWindow, WriteSuite, episode


def test_a_checkpoint_with_heads_predicts_rewards_and_ends(
    tmp_path: Path, make_window: MakeWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 2)
    folder = save_checkpoint(tmp_path, random_model(prediction_heads=True))
    windows = [make_window("a"), make_window("b", goal="another goal")]
    found = CheckpointPredictor(folder).predict(windows, "observed", [1, 3])
    model = WorldModel.from_pretrained(folder)
    world = model.encode([window_context(window, "observed") for window in windows])
    for k in (1, 2, 3):
        world = model.advance(world, [window["actions"][k - 1] for window in windows])
        ahead = model.predictions(world)
        for i, prediction in enumerate(found):
            assert prediction.rewards.get(k) == (None if k == 2 else pytest.approx(float(ahead.reward[i]), rel=1e-4))
            assert prediction.ends.get(k) == (None if k == 2 else bool(ahead.continuation[i] < 0.5))


def test_a_checkpoint_is_run_as_its_rollout(
    checkpoint: Path, make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 6)
    long = [(None, "Start."), *[("look around", "a table, a chair and a stove. " * 20)] * 20]
    windows = [make_window("short"), make_window("long", long)]
    arguments = ["run", "--model", str(checkpoint), "--suite", str(write_suite(windows)), "--context", "observed"]
    assert main([*arguments, "--horizons", "1,3", "--depth", "3", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["provenance"]["depth"] == 3
    assert len(found["provenance"]["model_sha256"]) == 64
    assert found["windows_cut_share"] == 0.5

    model = WorldModel.from_pretrained(checkpoint)
    contexts = [window_context(window, "observed") for window in windows]
    world = model.encode(contexts, 3)
    expected: dict[tuple[str, int], str] = {}
    for k in (1, 2, 3):
        world = model.advance(world, [window["actions"][k - 1] for window in windows])
        expected |= {(w["id"], k): text for w, text in zip(windows, model.decode(world, 6), strict=True)}
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    predicted = {(r["id"], r["horizon"]): r["prediction"] for r in map(json.loads, lines)}
    assert predicted == {key: text for key, text in expected.items() if key[1] != 2}


def test_a_run_says_how_many_of_its_windows_are_foreign(
    checkpoint: Path,
    make_window: MakeWindow,
    write_suite: WriteSuite,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 4)
    windows = [
        make_window("known"),
        make_window("foreign", goal="Zxqj ##@@ %%!!~~ qqzz"),
        make_window("other", goal="^^~~@@##"),
    ]
    model = shutil.copytree(checkpoint, tmp_path / "model")
    tokenizer = WorldModel.from_pretrained(model).tokenizer
    shares = {w["id"]: tokens_per_byte(tokenizer, w["goal"], w["history"][0]["observation"]) for w in windows}
    arguments = ["run", "--model", str(model), "--suite", str(write_suite(windows)), "--context", "observed"]
    config = json.loads((model / "config.json").read_text())
    for limit, said in ((shares["known"], " 2 are worded unlike every training episode"), (10.0, None), (None, None)):
        (model / "config.json").write_text(json.dumps(config | {"tokens_per_byte": limit}))
        out = tmp_path / f"out-{limit}"
        assert main([*arguments, "--horizons", "1", "--out", str(out)]) == 0
        for text in (capsys.readouterr().out, (out / "report.md").read_text()):
            assert said in text if said else "worded unlike" not in text


def test_greedy_decoding_of_a_run_is_recorded(
    checkpoint: Path, make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    decode = WorldModel.decode_each
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 4)
    monkeypatch.setattr(WorldModel, "decode_each", lambda *a: asked.append(a[-2]) or decode(*a))
    arguments = ["run", "--suite", str(write_suite([make_window("w")])), "--context", "observed", "--horizons", "1"]
    for out, options in (("likelier", []), ("greedy", ["--greedy"])):
        assert main([*arguments, "--model", str(checkpoint), *options, "--out", str(tmp_path / out)]) == 0
    runs = [json.loads((tmp_path / out / "results.json").read_text()) for out in ("likelier", "greedy")]
    assert [run["provenance"].get("decoding") for run in runs] == ["likelier of two", None]
    assert asked == [False, True]
    assert main([*arguments, "--model", "copy", "--greedy", "--out", str(tmp_path / "copy")]) == 2


def test_outcomes_recalled_from_a_memory_are_predicted_and_recorded(
    checkpoint: Path, make_window: MakeWindow, write_suite: WriteSuite, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("eval.models.checkpoint.LONGEST_OBSERVATION", 12)
    memory = tmp_path / "train.jsonl"
    memory.write_text(episode(("take red pan", "You take the red pan."), env="elsewhere"))
    window = make_window("w", goal="Æ" * 50, actions=["take blue pan"] * 5, env="elsewhere")  # foreign
    model = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tokens_per_byte": 0.0}))
    arguments = ["run", "--suite", str(write_suite([window])), "--context", "observed", "--horizons", "1"]
    out, options = tmp_path / "out", ["--model", str(model), "--memory", str(memory)]
    assert main([*arguments, *options, "--out", str(out)]) == 0
    assert json.loads((out / "predictions.jsonl").read_text())["prediction"] == "You take the blue pan."
    assert json.loads((out / "results.json").read_text())["provenance"]["memory_sha256"]
    assert main([*arguments, "--model", "copy", "--memory", str(memory), "--out", str(tmp_path / "copy")]) == 2
    assert "--memory: not an option of 'copy'" in capsys.readouterr().err


def test_a_head_over_the_context_limit_names_the_window(checkpoint: Path, make_window: MakeWindow) -> None:
    windows = [make_window("fits"), make_window("huge", goal="heat the red apple " * 2000)]
    with pytest.raises(ValueError, match="window huge: context"):
        CheckpointPredictor(checkpoint).predict(windows, "observed", [1])


@pytest.mark.parametrize("depth", [0, 99])
def test_a_depth_outside_the_checkpoints_is_refused(checkpoint: Path, depth: int) -> None:
    with pytest.raises(ValueError, match=f"--depth: must be 1 to max_loops = 6, got {depth} loops"):
        CheckpointPredictor(checkpoint, depth)


def test_pretrained_names_the_shipped_checkpoint() -> None:
    parser = ArgumentParser()
    add_model_arguments(parser)
    assert Path(parser.parse_args(["--model", "pretrained"]).model, "config.json").is_file()
    assert parser.parse_args(["--model", "copy"]).model == "copy"
