"""Measure how often a TWISTED checkpoint predicts the next frame exactly, by decoder (TWISTED, table 3).

Held-out play is cut into runs of consecutive frames; every transition in them is predicted from the real frames before
it. A frame is right if all tokens are; its centre, if all tokens of the transport region are.

Shape suffixes: B runs, T frames of a run, L patch tokens, K codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwm.pixel.twisted.decoding import Decoder
from loopwm.pixel.twisted.model import TokenBatch
from loopwm.pixel.twisted.system import TwistedSystem
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameEpisode, episode_files, read_episode

CREATURE = "creature"
"""Extra of recorded episodes: True for frames that show a creature, which moves at random."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Runs of T consecutive transitions as tokens; creature: bool (B, T), True if the frame before shows one."""

    batch: TokenBatch
    creature: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.creature)

    @property
    def episode(self) -> NDArray[np.int64]:
        """Episode number of each transition, (B * T,); an episode may span several runs."""
        number: NDArray[np.int64] = self.batch.first.flatten().cumsum(0).numpy()
        return number


def held_out(folder: Path, system: TwistedSystem, frames: int, transitions: int) -> HeldOut:
    """Load the first `transitions` of a folder in runs of `frames`.

    Raises:
        InputError: the folder is too small or of another environment
    """
    episodes = [read_episode(path) for path in episode_files(folder)]
    for episode in episodes:
        system.space.require(episode.space, str(folder))
    runs = -(-transitions // frames)
    available = sum(len(episode) for episode in episodes) // frames
    if available < runs:
        raise InputError(f"{folder}: must have {transitions} transitions in runs of {frames}, got {available * frames}")
    rows = [np.concatenate(parts)[: runs * frames] for parts in zip(*map(_columns, episodes), strict=True)]
    obs, next_obs, action, reward, terminated, first, creature = (
        rows_of.reshape(runs, frames, *rows_of.shape[1:]) for rows_of in rows
    )
    tokens = [system.tokenizer.encode(torch.from_numpy(x)) for x in (obs, next_obs)]
    rest = [torch.from_numpy(x) for x in (action, reward, terminated, first)]
    return HeldOut(TokenBatch(*tokens, *rest), creature)


def _columns(episode: FrameEpisode) -> tuple[NDArray[np.generic], ...]:
    """Return the columns of an episode's steps."""
    steps = len(episode)
    first = np.arange(steps) == 0
    creature = episode.extras.get(CREATURE, np.zeros(steps + 1, dtype=bool))[:-1]
    obs, next_obs = episode.obs[:-1], episode.obs[1:]
    return obs, next_obs, episode.action, episode.reward, episode.terminated, first, creature


def permuted_actions(data: HeldOut, seed: int) -> HeldOut:
    """Permute the actions of all transitions: a model that uses actions must do worse."""
    order = torch.randperm(data.batch.action.numel(), generator=torch.Generator().manual_seed(seed))
    action = data.batch.action.flatten()[order].view_as(data.batch.action)
    return HeldOut(data.batch._replace(action=action), data.creature)


@dataclass(frozen=True, eq=False)
class Hits:
    """Correct transitions, bool (B * T,): whole frame and centre."""

    frame: NDArray[np.bool_]
    centre: NDArray[np.bool_]


def predict(
    system: TwistedSystem, data: HeldOut, depth: int | None, rows: int = 8
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield p (N, L, K) of every transition and the tokens before and after it (N, L), `rows` runs at a time."""
    chosen = system.looped.default_depth if depth is None else depth
    for start in range(0, len(data), rows):
        part = TokenBatch(*(tensor[start : start + rows] for tensor in data.batch))
        with torch.inference_mode():
            logits, _ = system.network(part.tokens, part.action, part.first, chosen)
            p = system.probabilities(logits.tokens).flatten(0, 1)
        yield p, part.tokens.flatten(0, 1), part.next_tokens.flatten(0, 1)


def score(
    system: TwistedSystem,
    data: HeldOut,
    decoders: Mapping[str, Decoder],
    centre: Tensor,
    seed: int,
    depth: int | None = None,
) -> dict[str, Hits]:
    """Score every decoder on the same probabilities and random numbers. centre: bool (L,)."""
    generators = {name: torch.Generator().manual_seed(seed) for name in decoders}
    right: dict[str, list[Tensor]] = {name: [] for name in decoders}
    for p, previous, after in predict(system, data, depth):
        for name, decoder in decoders.items():
            right[name].append(decoder(p, previous, generators[name]) == after)
    hits = {name: torch.cat(parts) for name, parts in right.items()}
    return {name: Hits(x.all(-1).numpy(), x[:, centre].all(-1).numpy()) for name, x in hits.items()}


@dataclass(frozen=True)
class Accuracy:
    """Accuracy over all transitions, and those with and without a creature before; NaN if there are none."""

    n: int
    all: float
    with_creatures: float
    without_creatures: float


def accuracy(right: NDArray[np.bool_], creature: NDArray[np.bool_]) -> Accuracy:
    creature = creature.flatten()
    parts: Sequence[NDArray[np.bool_]] = (right, right[creature], right[~creature])
    return Accuracy(len(right), *(float(part.mean()) if len(part) else float("nan") for part in parts))
