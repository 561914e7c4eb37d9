"""Does an imagined maze still hold its cue? MiniGrid's Memory mazes, after EDELINE's figure 1.

Four left turns are seen, the cue among them; then the world imagines: some steps of waiting, and two left turns, after
which the cue must be there again. Mazes count whose cue is out of sight while the agent waits and in sight at the end.
Of each last frame: which of the two kinds of cue its tile is nearer to, the real frame's or the other's; whether it is
nearer to one of the two than to their mean; and the error of the whole frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from eval.scores.intervals import interval95
from eval.scores.tables import table
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.imagined import FrameWorld
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.training.real_world import real_environment

LEFT, STAY = 0, 6
SEEN, BACK = 4, 2
WAITS = (8, 16, 32, 64)
ROWS = 50
"""Worlds imagined at once."""

Frames = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Mazes:
    """What is seen (M, SEEN + 1, H, W, C), the frame after waiting and turning back (M, H, W, C), the place of the
    cue's tile in it (M, 2), its kind (M,), and how many mazes were looked at."""

    seen: Frames
    last: Frames
    cue: NDArray[np.int64]
    kind: NDArray[np.int64]
    tried: int


def mazes(name: str, count: int, first_seed: int) -> Mazes:
    """The first `count` that are valid. Raises InputError for an environment without a cue."""
    env = real_environment(name)
    found: list[tuple[Frames, Frames, NDArray[np.int64], int]] = []
    seed = first_seed
    while len(found) < count:
        frame, told = env.reset(seed=seed)
        if "cue" not in told:
            raise InputError(f"environment: {name} has no cue to remember")
        seed += 1
        frames = [frame]
        for _ in range(SEEN):
            frame, *_, told = env.step(np.int64(LEFT))
            frames.append(frame)
        hidden = told["cue"][0] < 0
        for _ in range(BACK):
            frame, *_, told = env.step(np.int64(LEFT))
        if hidden and told["cue"][0] >= 0:
            found.append((np.stack(frames), frame, np.asarray(told["cue"]), int(told["cue_kind"])))
    env.close()
    seen, last, cue, kind = zip(*found, strict=True)
    return Mazes(np.stack(seen), np.stack(last), np.stack(cue), np.array(kind), seed - first_seed)


def imagined(world: FrameWorld[Any], seen: Frames, waits: Sequence[int], seed: int) -> dict[int, Frames]:
    """By steps of waiting, the frame after turning back: (M, H, W, C)."""
    generator = torch.Generator().manual_seed(seed)
    obs, rows = torch.from_numpy(seen), len(seen)
    first = torch.zeros(rows, SEEN + 1, dtype=torch.bool)
    first[:, 0] = True
    left, stay = (torch.full((rows,), action) for action in (LEFT, STAY))
    state, found = world.start(obs, left[:, None].expand(-1, SEEN), first, generator), {}
    for waited in range(1, max(waits) + 1):
        state = world.step(state, stay, generator).state
        if waited in waits:
            back = state
            for _ in range(BACK):
                back = world.step(back, left, generator).state
            found[waited] = world.show(back).numpy()
    return found


@dataclass(frozen=True)
class Recall:
    """right: share of frames whose cue is the real one, with 95 % bounds over mazes; definite: share whose tile is
    nearer to one of the two cues than to their mean; error: mean square over pixels in [0, 1]."""

    mazes: int
    right: float
    low: float
    high: float
    definite: float
    error: float


def scored(found: Frames, real: Mazes) -> Recall:
    """Raises ValueError where only one kind of cue was seen."""
    tile = found.shape[1] // 8
    tiles = [_tiles(frames, real.cue, tile) for frames in (found, real.last)]
    ours, theirs = tiles
    kinds = [theirs[real.kind == kind].mean(0) for kind in (0, 1)]
    own, other = (np.stack([kinds[k] for k in choice]) for choice in (real.kind, 1 - real.kind))
    distance = [np.square(ours - of).mean((1, 2, 3)) for of in (own, other, (own + other) / 2)]
    right = (distance[0] < distance[1]).astype(float)
    low, high = interval95(right[:, None])[:, 0].tolist()
    definite = np.minimum(distance[0], distance[1]) < distance[2]
    error = np.square(found / 255 - real.last / 255).mean()
    return Recall(len(right), float(right.mean()), low, high, float(definite.mean()), float(error))


def _tiles(frames: Frames, cue: NDArray[np.int64], tile: int) -> NDArray[np.float64]:
    """The cue's tile of each frame, in [0, 1]."""
    return np.stack(
        [frame[r * tile : (r + 1) * tile, c * tile : (c + 1) * tile] for frame, (r, c) in zip(frames, cue, strict=True)]
    ) / 255  # fmt: skip


def run_study(models: dict[str, Path], name: str, count: int, seed: int, out: Path) -> None:
    """Writes results.json and report.md to the folder `out`."""
    real, results = mazes(name, count, 10_000_000 + seed), {}
    for label, folder in models.items():
        system = load_checkpoint(folder)
        if system.space.frame_shape != real.seen.shape[2:]:
            raise InputError(f"{folder}: imagines frames of {system.space.frame_shape}, not {real.seen.shape[2:]}")
        parts = [
            imagined(system.world(), real.seen[start : start + ROWS], WAITS, seed + start)
            for start in tqdm(range(0, count, ROWS), unit="batch", desc=label)
        ]
        whole = {wait: np.concatenate([part[wait] for part in parts]) for wait in WAITS}
        results[label] = {str(wait): asdict(scored(frames, real)) for wait, frames in whole.items()}
    record = {
        "study": "recall in pixels",
        "environment": name,
        "tried": real.tried,
        "models": {label: str(folder) for label, folder in models.items()},
        "results": results,
        "provenance": provenance("eval"),
    }
    write_json(out / "results.json", record)
    write_atomic(out / "report.md", render(record, count))


def render(record: dict[str, Any], count: int) -> str:
    head = (
        f"# Study: recall in pixels\n\n{record['environment']}: four left turns seen, then steps of waiting and two "
        f"turns imagined; {count} valid mazes of {record['tried']}. In so many percent of them the cue of the last "
        "frame is the real one (95 %), and is one of the two rather than their mean; the frame's mean square error.\n\n"
    )
    lines = [
        [label, wait, _percent(r["right"], r["low"], r["high"]), f"{100 * r['definite']:.1f}", f"{r['error']:.4f}"]
        for label, waits in record["results"].items()
        for wait, r in waits.items()
    ]
    return head + table(["Model", "steps of waiting", "right", "one of the two", "error"], lines) + "\n"


def _percent(share: float, low: float, high: float) -> str:
    return f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})"
