"""A batch of worlds, and how batches are put together and taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loopwm.core import ExitRule, KVCache, SharedPrefixCache
from loopwm.records.template import FormatError


@dataclass(frozen=True)
class World:
    """A batch of worlds at the same number of imagined steps.

    history: keys and values of what was really seen. state: these and the imagined steps, all that the next step sees;
    the slots of h_0 stand between them where the template has none in the trunk. latent: (B, M, D) h_k at the newest
    slots. depth: the rule of every pass. steps: imagined since the last real
    observation. steps_cut: old steps dropped from each row's context to fit the limit. ended: rows the caller marked as
    over; no action can follow there. loops: those of each row's imagined steps.
    """

    history: KVCache
    state: KVCache
    latent: Tensor
    depth: ExitRule
    steps: int
    steps_cut: tuple[int, ...]
    ended: tuple[bool, ...]
    loops: tuple[tuple[int, ...], ...]

    @classmethod
    def at_h_0(
        cls,
        history: KVCache,
        state: KVCache,
        latent: Tensor,
        depth: ExitRule,
        steps_cut: tuple[int, ...],
    ) -> World:
        """Worlds in which nothing is imagined yet."""
        rows = len(steps_cut)
        return cls(history, state, latent, depth, 0, steps_cut, (False,) * rows, ((),) * rows)

    def __len__(self) -> int:
        return len(self.latent)

    def select(self, rows: Sequence[int]) -> World:
        """The worlds of these rows; repeats make independent copies.

        What a world that was encoded by itself has really seen is kept once for all its copies, and read once in every
        pass over them: the way to try many actions.
        """
        index = torch.tensor(rows, dtype=torch.long, device=self.latent.device)
        return replace(
            self,
            history=self.history.select(index),
            state=self.state.select(index),
            latent=self.latent[index],
            steps_cut=tuple(self.steps_cut[i] for i in rows),
            ended=tuple(self.ended[i] for i in rows),
            loops=tuple(self.loops[i] for i in rows),
        )

    def end(self, rows: Sequence[int]) -> World:
        """The same worlds with these rows marked as over: `advance` and `observe` refuse them from then on."""
        return replace(self, ended=tuple(ended or i in rows for i, ended in enumerate(self.ended)))


def shareable(history: KVCache) -> KVCache:
    """A single history as something that copies of its world share."""
    return SharedPrefixCache(history.row(0).whole(), 1) if len(history.valid) == 1 else history


def by_prefix(states: Sequence[KVCache]) -> list[list[int]]:
    """Which of these go on from one prefix, and can read it together."""
    families: dict[int, list[int]] = {}
    for i, state in enumerate(states):
        families.setdefault(id(state.prefix if isinstance(state, SharedPrefixCache) else state), []).append(i)
    return list(families.values())


def joined(states: Sequence[KVCache]) -> KVCache:
    first, *others = states
    return first.join(*others) if others else first.fork()


def row_of(state: KVCache, row: int) -> KVCache:
    """The state of one row without padding: the state itself where that is all there is."""
    return state if len(state.valid) == 1 and state.valid.all() else state.row(row)


def same_length(name: str, values: Sequence[str], world: World) -> None:
    if len(values) != len(world):
        raise FormatError(name, f"{len(values)} given for {len(world)} worlds")


def not_ended(world: World) -> None:
    if any(world.ended):
        raise FormatError("world", f"row {world.ended.index(True)} has ended, no action can follow")
