"""Claims about a world: worlds that are right, blind or deaf are found out, and the study through the front door."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import yaml

from lab.__main__ import main
from lab.pixels.paper_claims import ClaimFigures, Play, held_out_play, measure
from lab.pixels.paper_claims_study import CLAIMS, worst_of_copy
from loopwm.pixel.imagined import Imagined
from loopwm.pixel.storm.model import StormConfig
from loopwm.pixel.storm.system import StormObjective, StormSystem
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameEpisode, FrameSpace, write_episode

SPACE = FrameSpace("slides", "1", (8, 8, 1), 3)
TINY = StormConfig(
    groups=2, classes=4, image="small", stem=4, dim=16, heads=2, mlp_dim=16, positions=16, context=4, coda_layers=0
)
CONTEXT, STEPS = 3, 4


def drawn(column: int) -> np.ndarray:
    frame = np.zeros(SPACE.frame_shape, np.uint8)
    frame[4, column] = 255
    return frame


def episode(seed: int, steps: int = 20) -> FrameEpisode:
    """A dot that an action sends to the left, nowhere, or to the right, around the frame."""
    rng = np.random.default_rng(seed)
    action = rng.integers(3, size=steps)
    columns = (rng.integers(8) + np.concatenate(([0], np.cumsum(action - 1)))) % 8
    no, nothing, last = np.zeros(steps, dtype=bool), np.zeros(steps, np.float32), np.arange(steps) == steps - 1
    return FrameEpisode(SPACE, np.stack([drawn(c) for c in columns]), action, nothing, no, last, seed, "random")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("slides")
    for seed in range(4):
        write_episode(path / f"{seed}.npz", episode(seed))
    return path


@dataclass
class Slides:
    """A world that knows the rules, or one that heeds no action."""

    deaf: bool = False

    def start(self, obs, action, first, generator):
        return obs[:, -1]

    def step(self, state, action, generator):
        moved = [frame if self.deaf else frame.roll(int(a) - 1, 1) for frame, a in zip(state, action, strict=True)]
        return Imagined(torch.zeros(len(action)), torch.zeros(len(action), dtype=torch.bool), torch.stack(moved))

    def show(self, state):
        return state


def measured(world, folder, monkeypatch) -> tuple[ClaimFigures, Play]:
    torch.manual_seed(0)
    system = StormSystem(TINY, StormObjective(), SPACE).eval()
    play = held_out_play(folder, system, 30, CONTEXT + STEPS, seed=0)
    monkeypatch.setattr(system, "world", lambda: world)
    return measure(system, play, CONTEXT, range(8), seed=0), play


def test_a_world_that_knows_the_rules_errs_nowhere_but_where_actions_are_another_s(folder, monkeypatch):
    found, play = measured(Slides(), folder, monkeypatch)
    assert found.open_loop == (0.0,) * STEPS
    assert found.own == 0.0
    assert found.permuted > 0.5
    moving = (play.obs != play.obs[:, :1]).any(1)
    by_hand = [
        float(((play.obs[:, CONTEXT - 1] != play.obs[:, CONTEXT + t])[moving]).float().mean()) for t in range(STEPS)
    ]
    assert found.copy_last == pytest.approx(by_hand)


def test_a_world_that_heeds_no_action_is_the_last_frame_and_errs_alike_by_any(folder, monkeypatch):
    found, _ = measured(Slides(deaf=True), folder, monkeypatch)
    assert found.open_loop == found.copy_last
    assert found.own == found.permuted > 0


def test_latents_that_tell_nothing_use_no_group_and_those_of_a_code_use_their_bits(folder, monkeypatch):
    found, play = measured(Slides(), folder, monkeypatch)
    assert found.used_groups == 0
    told = StormSystem(replace(TINY, classes=8, uniform_mix=0.0), StormObjective(), SPACE).eval()
    code = torch.nn.functional.one_hot(play.obs[..., 4, :, 0].argmax(-1), 8).float().clamp(min=1e-9).log()
    nothing = torch.full_like(code, 1 / 8).log()
    monkeypatch.setattr(told.network, "encode", lambda obs: torch.stack((code, nothing), -2))
    monkeypatch.setattr(told, "world", Slides)
    assert measure(told, play, CONTEXT, range(8), seed=0).used_groups == 1


def found_of(**changes) -> ClaimFigures:
    whole = ClaimFigures(1.0, 4.0, 3.0, 1.0, 9.0, 4.0, 8, (0.1,) * 6, (0.05, 0.1, 0.1, 0.2, 0.2, 0.4), 1.0, 1.5)
    return replace(whole, **changes)


def test_every_claim_holds_on_one_side_of_its_bar_alone():
    assert all(claim.holds(found_of()) for claim in CLAIMS)
    broken = ({"mean_frame": 1.0}, {"shuffled": 1.9}, {"used_groups": 7}, {"kl_uniform": 2.0}, {"kl_mean": 2.0})
    broken += ({"open_loop": (0.1,) * 5 + (0.4,)}, {"permuted": 1.49})
    for index, changes in enumerate(broken):
        assert [claim.holds(found_of(**changes)) for claim in CLAIMS] == [i != index for i in range(len(CLAIMS))]
    assert worst_of_copy(found_of(open_loop=(9.0, 9.0, 9.0, 0.1, 0.1, 0.1))) == pytest.approx(0.5)


@pytest.fixture
def protocol(folder, tmp_path):
    sizes = {name: getattr(TINY, name) for name in ("groups", "classes", "image", "stem", "dim", "heads", "mlp_dim")}
    config = {
        "system": "storm",
        "model": sizes | {"positions": 16, "context": 4, "coda_layers": 0},
        "data": {"train": str(folder), "dev": str(folder)},
        "batch": {"rows": 2, "steps": 6},
        "run": {"steps": 2, "mixed_precision": "no", "eval_every": 2, "eval_batches": 1, "save_every": 2},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(config))
    study = {
        "question": "Does it run?",
        "base": str(tmp_path / "base.yaml"),
        "frames": str(folder),
        "columns": [0, 7],
        "sequences": 5,
        "context": CONTEXT,
        "steps": STEPS,
        "seeds": [0],
        "arms": {"looped": {}, "narrow": {"overrides": ["model.mlp_dim=32"]}},
        "reference": "looped",
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


@pytest.mark.slow
def test_the_study_trains_measures_and_goes_on_where_it_was(protocol, tmp_path, capsys):
    arguments = ["pixels", "paper-claims", "--protocol", str(protocol), "--out", str(tmp_path / "study")]
    assert main(arguments) == 0
    assert "| looped, by seed | narrow, by seed |" in capsys.readouterr().out
    kept = tmp_path / "study" / "looped" / "seed-0" / "claims.json"
    before = kept.stat().st_mtime_ns
    assert main(arguments) == 0
    assert kept.stat().st_mtime_ns == before
    assert main([*arguments, "sequences=6"]) == 0
    assert json.loads(kept.read_text())["asked"]["sequences"] == 6


def test_bad_protocols_and_play_are_named(protocol, folder, tmp_path, capsys):
    out = ["--out", str(tmp_path / "study")]
    told = {
        "columns=[3, 1]": "columns: must be an ascending range, got 3 to 1",
        "steps=3": "steps: must be at least 4, got 3",
        "steps=14": "steps: with the context must be at most model.positions (16), got 17",
        "sequences=1": "sequences: must be at least 2, got 1",
    }
    for change, message in told.items():
        assert main(["pixels", "paper-claims", "--protocol", str(protocol), *out, change]) == 2
        assert message in capsys.readouterr().err
    torch.manual_seed(0)
    system = StormSystem(TINY, StormObjective(), SPACE)
    with pytest.raises(InputError, match="must have 61 sequences of 7 frames, got 60"):
        held_out_play(folder, system, 61, 7, seed=0)
    other = StormSystem(TINY, StormObjective(), replace(SPACE, actions=4))
    with pytest.raises(InputError, match="actions is 3, expected 4"):
        held_out_play(folder, other, 5, 7, seed=0)
