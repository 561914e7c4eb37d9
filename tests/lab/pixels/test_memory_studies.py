"""Studies of memory: what is asked, how answers are scored, and both commands through the front door."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.__main__ import main
from lab.pixels import cue_memory, memory_probe, memory_recall
from lab.pixels.mazes import tiles_of
from lab.pixels.memories import ModuleConfig
from loopwm.pixel.checkpoint import save_checkpoint
from loopwm.pixel.edeline.config import EdelineConfig, EdelineLoss
from loopwm.pixel.edeline.memory import MemoryConfig
from loopwm.pixel.edeline.system import Edeline
from loopwm.pixel.edeline.unet import UNetConfig
from loopwm.pixel.imagined import Imagined
from loopwm.records.frames import FrameSpace

TINY = MemoryConfig(dim=16, heads=2, mlp_dim=16)
GRU = ModuleConfig(kind="gru", dim=16, heads=2, mlp_dim=16)


def test_a_question_is_a_cue_other_symbols_and_the_mark():
    symbols, cue = cue_memory.make_rows(50, 6, np.random.default_rng(0))
    assert symbols.shape == (50, 8)
    assert torch.equal(symbols[:, 0], cue)
    assert set(cue.tolist()) == set(range(cue_memory.CUES))
    assert (symbols[:, 1:-1] >= cue_memory.CUES).all()
    assert (symbols[:, 1:-1] < cue_memory.QUESTION).all()
    assert (symbols[:, -1] == cue_memory.QUESTION).all()


def test_who_cannot_see_the_cue_guesses_and_who_can_learns_it(tmp_path):
    settings = cue_memory.Settings(steps=120, seeds=(0,), questions=200, learning_rate=1e-2)
    modules = {"gru": GRU, "of four": replace(GRU, frames=4)}
    found = cue_memory.run_study(tmp_path, settings, modules)["modules"]
    assert found["gru"][0]["8"] > 0.9
    assert found["of four"][0]["8"] < 0.45
    before = (tmp_path / "gru-0.json").stat().st_mtime_ns
    cue_memory.run_study(tmp_path, settings, modules)
    assert (tmp_path / "gru-0.json").stat().st_mtime_ns == before
    assert "| of four |" in (tmp_path / "report.md").read_text()


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("minigrid", reason="pip install 'loopwm[minigrid]'")
    return memory_recall.mazes("minigrid/MemoryS7@pixels=32", 12, 500)


def test_mazes_are_those_whose_cue_goes_out_of_sight_and_comes_back(real):
    assert real.context.shape == (12, 5, 32, 32, 3)
    assert np.array_equal(real.context[:, 0], real.context[:, 4])  # four turns are a whole one
    assert np.array_equal(real.last, real.context[:, 2])
    assert 12 < real.tried < 24
    assert set(real.kind.tolist()) == {0, 1}


def test_answers_are_scored_by_the_cues_tile(real):
    perfect = memory_recall.scored(real.last, real)
    assert (perfect.right, perfect.definite, perfect.error) == (1, 1, 0)
    swapped, mean = real.last.copy(), real.last.copy()
    tiles = tiles_of(real.last, real.cue, 4)
    kinds = [tiles[real.kind == kind][0] for kind in (0, 1)]
    for i, (row, column) in enumerate(real.cue):
        place = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
        swapped[i][place] = np.rint(255 * kinds[1 - real.kind[i]])
        mean[i][place] = np.rint(255 * (kinds[0] + kinds[1]) / 2)
    assert memory_recall.scored(swapped, real).right == 0
    assert memory_recall.scored(mean, real).definite == 0
    assert memory_recall.scored(mean, real).error > 0


def test_a_probe_is_shown_what_an_agent_would_see(real):
    from loopwm.pixel.gym import real_environment

    obs, action = memory_probe.shown(real, 3)
    env = real_environment("minigrid/MemoryS7@pixels=32")
    frame = env.reset(
        seed=next(seed for seed in range(500, 524) if np.array_equal(env.reset(seed=seed)[0], obs[0, 0]))
    )[0]
    for t in range(obs.shape[1]):
        assert np.array_equal(frame, obs[0, t])
        frame = env.step(np.int64(action[0, t] if t < action.shape[1] else memory_recall.LEFT))[0]
    assert np.array_equal(frame, real.last[0])
    env.close()


def test_a_probe_tells_what_is_there_and_guesses_at_noise():
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(2, (400,), generator=generator).numpy()
    noise = torch.randn(400, 12, generator=generator)
    told = noise.clone()
    told[:, 3] += 3 * torch.from_numpy(2 * kind - 1)
    assert memory_probe.separable(told, kind) > 0.95
    assert 0.35 < memory_probe.separable(noise, kind) < 0.65
    assert 0.35 < memory_probe.separable(torch.zeros(400, 12), kind) < 0.65


class Remembering:
    """A world that shows the real frame after as many turns, and forgets after some steps of waiting."""

    def __init__(self, real, forgets_after):
        self.real, self.forgets_after = real, forgets_after

    def start(self, obs, action, first, generator):
        assert obs.shape[1] == memory_recall.SEEN + 1
        return 0, 0

    def step(self, state, action, generator):
        waited, turned = state
        turn = int(action[0] == memory_recall.LEFT)
        return Imagined(torch.zeros(len(action)), torch.zeros(len(action)).bool(), (waited + 1 - turn, turned + turn))

    def show(self, state):
        waited, turned = state
        assert turned == memory_recall.BACK
        frames = self.real.last if waited <= self.forgets_after else self.real.last[::-1].copy()
        return torch.from_numpy(frames)


def test_each_wait_is_followed_by_two_turns_of_its_own(real):
    found = memory_recall.imagined(Remembering(real, 16), real.context, memory_recall.WAITS, 0)
    assert [np.array_equal(found[wait], real.last) for wait in memory_recall.WAITS] == [True, True, False, False]


def test_the_command_measures_checkpoints(real, tmp_path, capsys):
    config = EdelineConfig(
        memory=TINY, unet=UNetConfig((8,), (1,), condition=8, stem=4, heads=1), encoder_channels=(4,), encoder_stem=4,
        action_dim=4, head_hidden=8, frames=1, burn_in=1,
    )  # fmt: skip
    space = FrameSpace("minigrid/MemoryS7@pixels=32", "1", (32, 32, 3), 7)
    save_checkpoint(Edeline(config, EdelineLoss(), space), tmp_path / "model")
    command = ["pixels", "memory-recall", f"tiny={tmp_path / 'model'}", "--mazes", "6", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]["tiny"]
    assert list(results) == ["8", "16", "32", "64"]
    assert main([*command, "--sampling", "{steps: 1}"]) == 0
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert record["sampling"] == {"steps": 1}
    assert record["results"]["tiny"] != results
    assert main([*command, "--sampling", "{stairs: 1}"]) == 2
    assert "stairs" in capsys.readouterr().err
    assert main([*command, "--environment", "minigrid/MemoryS7"]) == 2
    assert "frames must be (64, 64, 3), got (32, 32, 3)" in capsys.readouterr().err
