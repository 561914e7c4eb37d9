"""Recall study: does an imagined maze still contain its cue? MiniGrid's Memory mazes, after EDELINE's figure 1.

Four left turns are context, the cue among them; then the world imagines some steps of waiting and two left turns, after
which the cue must be visible again. `memory_probe` measures the same mazes with real frames instead, which separates a
memory that lost the cue from a decoder that did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from eval.scores.tables import table
from lab.pixels.filmstrip import world_of
from lab.pixels.mazes import BACK, LEFT, SEEN, STAY, Frames, Mazes, mazes, scored
from lab.pixels.memory_probe import Remembers, probed
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.imagined import FrameWorld
from loopwm.pixel.system import PixelSystem
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, write_json
from loopwm.records.provenance import provenance

WAITS = (8, 16, 32, 64)
ROWS = 50
"""Worlds per batch."""


def imagined(world: FrameWorld[Any], context: Frames, waits: Sequence[int], seed: int) -> dict[int, Frames]:
    """Imagine the frame after waiting and turning back, (M, H, W, C), by steps of waiting."""
    generator = torch.Generator().manual_seed(seed)
    obs, rows = torch.from_numpy(context), len(context)
    first = torch.zeros(rows, SEEN + 1, dtype=torch.bool)
    first[:, 0] = True
    left, stay = (torch.full((rows,), action) for action in (LEFT, STAY))
    state, by_wait = world.start(obs, left[:, None].expand(-1, SEEN), first, generator), {}
    for waited in range(1, max(waits) + 1):
        state = world.step(state, stay, generator).state
        if waited in waits:
            back = state
            for _ in range(BACK):
                back = world.step(back, left, generator).state
            by_wait[waited] = world.show(back).numpy()
    return by_wait


def run_study(
    models: dict[str, Path], name: str, count: int, seed: int, sampling: Mapping[str, Any], out: Path
) -> None:
    """Write results.json and report.md to the folder `out`. sampling: see `world_of`."""
    real, results = mazes(name, count, 10_000_000 + seed), {}
    for label, folder in models.items():
        system = load_checkpoint(folder)
        if system.space.frame_shape != real.context.shape[2:]:
            raise InputError(f"{folder}: frames must be {real.context.shape[2:]}, got {system.space.frame_shape}")
        results[label] = measured(system, world_of(system, sampling), real, seed, label)
    record = {
        "study": "recall in pixels",
        "environment": name,
        "tried": real.tried,
        "models": {label: str(folder) for label, folder in models.items()},
        "sampling": dict(sampling),
        "results": results,
        "provenance": provenance("lab"),
    }
    write_json(out / "results.json", record)
    write_atomic(out / "report.md", render(record, count))


def measured(
    system: PixelSystem, world: FrameWorld[Any], real: Mazes, seed: int, label: str
) -> dict[str, dict[str, float]]:
    """Score imagined frames and, for systems with an accessible memory, its contents, by steps of waiting."""
    parts = [
        imagined(world, real.context[start : start + ROWS], WAITS, seed + start)
        for start in tqdm(range(0, len(real.kind), ROWS), unit="batch", desc=label)
    ]
    by_wait = {str(wait): asdict(scored(np.concatenate([part[wait] for part in parts]), real)) for wait in WAITS}
    if isinstance(system, Remembers):
        for wait in WAITS:
            by_wait[str(wait)] |= asdict(probed(system, world, real, wait, seed))
    return by_wait


def render(record: dict[str, Any], count: int) -> str:
    head = (
        f"# Study: recall in pixels\n\n{record['environment']}: four left turns seen, then steps of waiting and two "
        f"turns imagined; {count} valid mazes of {record['tried']}. In so many percent of them the cue of the last "
        "frame is the real one (95 %), and is one of the two rather than their mean; the frame's mean square error. "
        "With real frames up to the last turn: in so many percent the cue of the frame drawn is right, and a linear "
        "classifier tells it from the memory (fitted to one half of the mazes, asked of the other).\n\n"
    )
    lines = [[label, wait, *_shown(r)] for label, waits in record["results"].items() for wait, r in waits.items()]
    columns = ["Model", "steps of waiting", "right", "one of the two", "error", "drawn", "in memory"]
    return head + table(columns, lines) + "\n"


def _shown(r: dict[str, float]) -> list[str]:
    probe = (f"{100 * r[name]:.1f}" if name in r else "" for name in ("drawn", "held"))
    return [_percent(r["right"], r["low"], r["high"]), f"{100 * r['definite']:.1f}", f"{r['error']:.1e}", *probe]


def _percent(share: float, low: float, high: float) -> str:
    return f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})"
