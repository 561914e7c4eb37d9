"""Collect play of MiniGrid's Memory mazes that waits, walks to the end of the corridor and chooses a side there.

The other options are those of `python -m data_prep collect` for frames.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from data_prep import collect
from data_prep.collect_frames import POLICIES
from loopwm.records.errors import InputError

EXAMPLE = (
    "python -m lab collect-choices minigrid/MemoryS7+MemoryS9@pixels=32 --split train --steps 60000 "
    "--out data/frames/memory-train"
)

LEFT, RIGHT, FORWARD, STAY = 0, 1, 2, 6
"""Actions of MiniGrid."""


def choose(actions: int, rng: np.random.Generator) -> Iterator[int]:
    """Look around and wait, one to three times, walk to the end of the corridor, turn left or right and go on.

    The side is random: the object shown before, or the other. For MiniGrid's Memory mazes, which begin along the
    corridor.
    """
    turned = 0
    for _ in range(int(rng.integers(1, 4))):
        turn, times = (LEFT, RIGHT)[int(rng.integers(2))], int(rng.integers(1, 5))
        yield from [turn] * times
        yield from [STAY] * int(rng.integers(17))
        turned += times if turn == LEFT else -times
    yield from [RIGHT] * (turned % 4)
    yield from [FORWARD] * CORRIDOR
    while True:
        yield int(rng.choice((LEFT, RIGHT)))
        yield FORWARD


CORRIDOR = 8
"""Steps to the end of the longest corridor, S9's; a wall stops any excess steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    collect.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if args.policy is not None:
        raise InputError(f"--policy: must be left out, got {args.policy}; this command has its own")
    if not args.environment.startswith("minigrid/"):
        raise InputError(f"environment: must be of minigrid, got {args.environment!r}")
    POLICIES["choose"] = choose
    args.policy = "choose"
    collect.run(args)
