"""A batch of worlds; selecting, joining and splitting batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loopwm.core.exit_rules import ExitRule
from loopwm.core.kv_cache import KVCache
from loopwm.records.template import FormatError

PASS_TOKENS = 48
"""Tokens in a long pass that take as long as a pass of one token (6.7 million parameters, one core)."""


@dataclass(frozen=True)
class World:
    """Batch of worlds at the same number of imagined steps.

    history: keys and values of the real steps. state: these and the imagined steps, all that the next step attends to,
    with the slots of h_0 between them if the template has none in the trunk. latent: (B, M, D) h_k at the newest slots,
    or (B, M, 2 D) with reward attention, whose result follows h_k.
    depth: rule of every pass. steps: imagined steps since the last real observation. steps_cut: old steps dropped from
    each row's context to fit the limit. loops: loops of each row's imagined steps.
    """

    history: KVCache
    state: KVCache
    latent: Tensor
    depth: ExitRule
    steps: int
    steps_cut: tuple[int, ...]
    loops: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.latent)

    @property
    def length(self) -> int:
        """Number of tokens of the longest row."""
        return int(self.state.next_position.max())

    def select(self, rows: Sequence[int]) -> World:
        """Select rows; repeated ones are independent copies.

        All copies of a world that was encoded by itself share its history, which is stored once and read once per pass:
        select [0] * n to try n actions.
        """
        index = torch.tensor(rows, dtype=torch.long, device=self.latent.device)
        return replace(
            self,
            history=self.history.select(index),
            state=self.state.select(index),
            latent=self.latent[index],
            steps_cut=tuple(self.steps_cut[i] for i in rows),
            loops=tuple(self.loops[i] for i in rows),
        )


def shareable(history: KVCache) -> KVCache:
    """Wrap the history of a single world so that its copies share it."""
    # `share` takes one row without padding and without a prefix of its own.
    return history.row(0).whole().share(1) if len(history.valid) == 1 else history


def by_prefix(states: Sequence[KVCache]) -> list[list[int]]:
    """Group indices of states behind one prefix, which can be joined."""
    families: dict[int, list[int]] = {}
    for i, state in enumerate(states):
        families.setdefault(id(state if state.prefix is None else state.prefix), []).append(i)  # without prefix: alone
    return list(families.values())


def joined(states: Sequence[KVCache]) -> KVCache:
    first, *others = states
    return first.join(*others) if others else first.fork()


def row_of(state: KVCache, row: int) -> KVCache:
    """Return one row without padding, the state itself if it is such a row."""
    return state if len(state.valid) == 1 and state.valid.all() else state.row(row)


def same_length(name: str, values: Sequence[str], world: World) -> None:
    if len(values) != len(world):
        raise FormatError(name, f"must be {len(world)}, one a world, got {len(values)}")


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group the places of similar lengths, as many as can be padded to the longest in less time than a pass takes."""
    groups: list[list[int]] = []
    padding = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups:
            padding += len(groups[-1]) * (lengths[place] - lengths[groups[-1][-1]])
        if groups and padding <= PASS_TOKENS:
            groups[-1].append(place)
        else:
            groups.append([place])
            padding = 0
    return groups
