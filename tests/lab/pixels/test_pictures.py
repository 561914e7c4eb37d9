"""Pictures of pixel worlds, and recorded episodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lab.__main__ import main
from lab.pixels import record
from lab.pixels.curve import read_curve, smoothed
from lab.pixels.filmstrip import Clip
from loopwm.pixel.agents.agent_trainer import AgentTrainer
from loopwm.pixel.gym import CATCH
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameEpisode, FrameSpace, episode_files, read_episode
from loopwm.training.__main__ import main as train
from tests.fixtures.blocks import SPACE
from tests.pixel.agents.test_agent_trainer import blocks, config


def test_a_recorded_episode_is_one_from_its_beginning_to_its_end(tmp_path, monkeypatch):
    AgentTrainer(config(), blocks(4), SPACE, tmp_path / "run").run()
    monkeypatch.setattr(record, "real_environments", lambda name, count: (blocks(count), SPACE))
    out = tmp_path / "episode.npz"
    assert main(["pixels", "record", "--run", str(tmp_path / "run"), "--steps", "40", "--out", str(out)]) == 0
    found = read_episode(out)
    assert found.policy == "agent"
    assert found.terminated[-1] | found.truncated[-1]
    assert not (found.terminated | found.truncated)[:-1].any()


def test_filmstrip_has_rows_for_truth_and_each_sampling(frames, twisted_config, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(["--config", str(twisted_config), "--out", str(run), "run.steps=2"]) == 0
    episode = max(episode_files(frames / "test"), key=lambda path: path.stat().st_size)
    common = ["pixels", "filmstrip", "--model", str(run / "model"), "--episode", str(episode)]
    common += ["--sampling", "sample={decoder: {kind: sample}}"]
    common += ["--sampling", "transport={decoder: {kind: noised-transport, c_d: 0.05, c_w: 0.6}}"]
    arguments = [*common, "--start", "2", "--context", "2", "--steps", "4", "--out", str(tmp_path / "sheet.png")]
    assert main(arguments) == 0
    width, height = Image.open(tmp_path / "sheet.png").size
    assert width > height
    film = [word if word != "filmstrip" else "film" for word in arguments[:-1]]
    assert main([*film, str(tmp_path / "film.gif")]) == 0
    shown = Image.open(tmp_path / "film.gif")
    assert (shown.n_frames, shown.size[0] > 2 * shown.size[1]) == (4, True)
    assert main([*common, "--steps", "400", "--out", str(tmp_path / "none.png")]) == 2
    assert "--steps: must be <= " in capsys.readouterr().err
    assert main([*arguments, "--sampling", "other={dekoder: {}}"]) == 2
    assert "dekoder: unknown key" in capsys.readouterr().err
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(("steps", "clip"), [(1, (0, 1, 1)), (9, (4, 5, 5)), (20, (10, 5, 10)), (300, (10, 5, 15))])
def test_default_clip_fits_any_episode(steps: int, clip: tuple[int, int, int]) -> None:
    space = FrameSpace("any", "", (1, 1, 1), 2)
    action, reward, ends = np.zeros(steps, np.int64), np.zeros(steps, np.float32), np.zeros(steps, bool)
    episode = FrameEpisode(space, np.zeros((steps + 1, 1, 1, 1), np.uint8), action, reward, ends, ends, 0, "random")
    found = Clip.within(episode, None, None, None)
    found.check(episode)
    assert (found.start, found.context, found.steps) == clip


def test_packaged_world_is_drawn_with_defaults(tmp_path: Path) -> None:
    arguments = ["--model", str(CATCH), "--episode", str(CATCH / "starts" / "000.npz")]
    assert main(["pixels", "filmstrip", *arguments, "--out", str(tmp_path / "sheet.png")]) == 0
    assert main(["pixels", "film", *arguments, "--out", str(tmp_path / "film.gif")]) == 0
    assert Image.open(tmp_path / "film.gif").n_frames == 5


def test_read_curve_without_interactions_names_the_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"interactions": 1}\n{"return": 1.0}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 2: interactions: missing"):
        read_curve(tmp_path)


def test_a_curve_is_the_mean_return_by_interactions(tmp_path, capsys):
    for name, level in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        lines = [{"interactions": 10 * i, **({"return": level * i} if i % 2 else {})} for i in range(1, 9)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = smoothed(read_curve(tmp_path / "b"), 2, 80)
    assert found.tolist() == [[40, 3 * (1 + 3) / 2], [80, 3 * (5 + 7) / 2]]
    picture = tmp_path / "curve.png"
    assert main(["pixels", "curve", f"both={tmp_path / 'a'},{tmp_path / 'b'}", "--out", str(picture)]) == 0
    assert Image.open(picture).size[0] > 100
    assert main(["pixels", "curve", f"none={tmp_path / 'c'}", "--out", str(picture)]) == 2
    assert capsys.readouterr().err.strip() == f"error: {tmp_path / 'c' / 'metrics.jsonl'}: no such file"
