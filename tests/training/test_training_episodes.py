"""What a checkpoint was trained on goes with it, and held-out episodes never come in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loopwm.records.training_episodes import FILE, TrainingEpisodes, episode_hash
from loopwm.text.export_command import main as export
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram
from loopwm.trainer.trainer import Trainer
from loopwm.training.__main__ import main
from tests.fixtures.shards import toy_episode, write_toy_shards

BRIEF = ["data.dev=[]", "run={steps: 2, mixed_precision: 'no', save_every: 1}"]


def expected(*numbers: int) -> set[int]:
    return {int(episode_hash(toy_episode(number)), 16) for number in numbers}


def train(config_file: Path, folder: Path, *overrides: str, start_from: Path | None = None) -> Path:
    """Returns the exported model's folder."""
    Trainer(load_config(config_file, [*BRIEF, *overrides]), TextProgram, folder, start_from).run()
    return folder / "model"


def known(model: Path) -> frozenset[int]:
    record = TrainingEpisodes.load(model)
    assert record is not None
    return record.episodes("scienceworld")


@pytest.fixture(scope="module")
def first(config_file, tmp_path_factory) -> Path:
    """A run on the forty toy episodes."""
    folder = tmp_path_factory.mktemp("first")
    train(config_file, folder)
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """Shards of two further episodes."""
    folder = tmp_path_factory.mktemp("others")
    write_toy_shards(folder, map(toy_episode, (98, 99)))
    return folder


def test_exported_models_name_episodes_and_games(first, tmp_path):
    checkpoint = first / "checkpoints" / "step-00000002"
    assert export(["--checkpoint", str(checkpoint), "--out", str(tmp_path / "apart")]) == 0
    for model in (first / "model", tmp_path / "apart"):
        assert known(model) == expected(*range(40))
        record = TrainingEpisodes.load(model)
        assert record.holds_game("scienceworld", "scienceworld/toy/39")
        assert not record.holds_game("scienceworld", "scienceworld/toy/40")
    assert (first / "model" / FILE).stat().st_size < 2000


def tokens_per_byte(model: Path) -> float | None:
    limit: float | None = json.loads((model / "config.json").read_text())["tokens_per_byte"]
    return limit


def test_exported_models_know_the_wordiest_start(first, others, config_file, tmp_path, tokenizer):
    def ratio(number: int) -> float:
        episode = toy_episode(number)
        texts = [episode.goal, episode.steps[0].observation]
        return sum(len(tokenizer.encode(text)) for text in texts) / sum(len(text.encode()) for text in texts)

    limit = max(ratio(number) for number in range(40))
    checkpoint = first / "checkpoints" / "step-00000002"
    assert export(["--checkpoint", str(checkpoint), "--out", str(tmp_path / "apart")]) == 0
    assert tokens_per_byte(first / "model") == tokens_per_byte(tmp_path / "apart") == pytest.approx(limit)
    joined = train(config_file, tmp_path / "run", f"data.train=[{others}]", f"model.weights={first / 'model'}")
    assert tokens_per_byte(joined) == pytest.approx(max(limit, ratio(98), ratio(99)))


@pytest.mark.parametrize("way", ["weights", "start_from"])
def test_runs_from_another_name_episodes_of_both(config_file, first, others, tmp_path, way):
    data = f"data.train=[{others}]"
    if way == "weights":
        model = train(config_file, tmp_path, data, f"model.weights={first / 'model'}")
    else:
        model = train(config_file, tmp_path, data, "run.steps=3", start_from=first / "checkpoints" / "step-00000002")
    assert known(model) == expected(*range(40), 98, 99)


def test_runs_from_unknown_weights_name_no_episodes(config_file, first, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in (first / "model").iterdir():
        if file.name != FILE:
            (bare / file.name).write_bytes(file.read_bytes())
    assert not (train(config_file, tmp_path / "run", f"model.weights={bare}") / FILE).exists()


def test_resumed_runs_keep_their_episodes(config_file, tmp_path):
    train(config_file, tmp_path)
    program = TextProgram(load_config(config_file, BRIEF))
    state = json.loads((tmp_path / "checkpoints" / "step-00000002" / "progress.json").read_text())["program"]
    program.load_state_dict(state)
    assert program.training_episodes.episodes("scienceworld") == expected(*range(40))
    program.load_state_dict({})
    assert program.training_episodes is None


@pytest.mark.parametrize(("split", "code"), [("dev", 2), ("test", 2), ("valid_seen", 2), ("built", 0)])
def test_training_on_a_held_out_split_is_refused(config_file, tmp_path, capsys, split, code):
    held_out = tmp_path / "held-out"
    write_toy_shards(held_out, [toy_episode(0), replace(toy_episode(1), split=split)])
    arguments = ["--config", str(config_file), "--out", str(tmp_path / "run"), f"data.train=[{held_out}]", *BRIEF]
    assert main(arguments) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")] or [""]
    if code:
        assert f"data.train: {held_out}: episode 2 is of split {split!r} (scienceworld, toy)" in line
        assert "tokenize those of train and built only" in line
        assert not (tmp_path / "run").exists()


def test_shards_without_hashes_are_refused(config_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("loopwm.records.training_episodes.read_metadata", lambda folder: [
        {"env": "scienceworld", "task": "toy", "variation": 0, "split": "train", "policy": "gold"}
    ])  # fmt: skip
    assert main(["--config", str(config_file), "--out", str(tmp_path / "run"), *BRIEF]) == 2
    assert "has no hashes of episodes: tokenize the episodes again" in capsys.readouterr().err
