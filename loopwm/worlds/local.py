"""Imagined worlds in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path

import torch
from torch import Tensor

from loopwm.core import ExitRule
from loopwm.records.template import LONGEST_OBSERVATION, Context, ContextTooLongError
from loopwm.text.decoding import Decoded
from loopwm.text.drafts import Lookup, SharedText, as_text
from loopwm.text.world import World, WorldModel
from loopwm.worlds.protocol import Imagined, check_lengths, check_rows, longer


class LocalWorlds:
    """Worlds of a checkpoint in this process.

    depth: loops of every pass or an exit rule, None for the checkpoint's default. beams: of the search that decodes, 1
    for greedy decoding.
    """

    def __init__(
        self,
        model: WorldModel,
        depth: int | ExitRule | None = None,
        max_new_tokens: int = LONGEST_OBSERVATION,
        beams: int = 1,
    ) -> None:
        self._model, self._depth, self._max_new_tokens, self._beams = model, depth, max_new_tokens, beams
        self._contexts: list[Context] = []
        self._real: World | None = None
        self._now: World | None = None

    @classmethod
    def from_pretrained(cls, path: str | Path, device: torch.device | None = None) -> LocalWorlds:
        """Load a checkpoint folder, onto the CPU by default.

        Raises:
            InputError: in one line, for a folder that is no checkpoint.
        """
        return cls(WorldModel.from_pretrained(path, device))

    def fresh(self) -> LocalWorlds:
        """Return other worlds of the same model, not begun."""
        return LocalWorlds(self._model, self._depth, self._max_new_tokens, self._beams)

    @property
    def world(self) -> World:
        """Return the current world. Raises ValueError before `begin`."""
        if self._now is None:
            raise ValueError("step: begin a world first")
        return self._now

    @property
    def steps_cut(self) -> tuple[int, ...]:
        return self.world.steps_cut

    def begin(self, contexts: Sequence[Context]) -> None:
        check_lengths(len(contexts), Context, contexts=contexts)
        self._contexts = list(contexts)
        self._real = self._now = self._model.encode(contexts, self._depth)

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        check_lengths(len(self.world), actions=actions)
        self._now = world = self._model.advance(self.world, actions)
        full = _full(self._model, world, self._max_new_tokens)
        if not decode or all(full):
            texts = [Imagined("")] * len(world)
        else:
            decoded = self._model.decode_traced(world, self._max_new_tokens, beams=self._beams)
            texts = [_imagined(one) for one in decoded]
        return _with_outcomes(self._model, world, texts, full)

    def fork(self, rows: Sequence[int]) -> LocalWorlds:
        check_rows(rows, len(self._contexts))
        fork = self.fresh()
        fork._contexts = [self._contexts[row] for row in rows]
        fork._now = self.world.select(rows)
        fork._real = fork._now if self._now is self._real or self._real is None else self._real.select(rows)
        return fork

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        check_lengths(len(self._contexts), actions=actions, observations=observations)
        steps = zip(self._contexts, actions, observations, strict=True)
        self._contexts = [longer(*step) for step in steps]
        assert self._real is not None
        try:
            self._real = self._now = self._model.observe(self._real, actions, observations)
        except ContextTooLongError:  # encoding drops the oldest steps
            self.begin(self._contexts)

    def nll(self, observations: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the teacher-forced loss of each row's observation after its last step, and its tokens.

        See `WorldModel.nll`.
        """
        return self._model.nll(self.world, observations)

    def close(self) -> None:
        self._real = self._now = None


class LocalRows:
    """Worlds of a checkpoint in this process, of which some can begin anew while the others go on."""

    def __init__(self, model: WorldModel, max_new_tokens: int = LONGEST_OBSERVATION) -> None:
        self._model, self._max_new_tokens = model, max_new_tokens
        self._worlds: list[World] = []
        self._lookups: list[Lookup] = []
        self._shared = SharedText()

    def begin(self, contexts: Sequence[Context]) -> None:
        self._worlds = [self._model.encode([context]) for context in contexts]
        self._lookups = [self._lookup(context) for context in contexts]

    def restart(self, rows: Sequence[int], contexts: Sequence[Context]) -> None:
        for row, context in zip(rows, contexts, strict=True):
            self._worlds[row], self._lookups[row] = self._model.encode([context]), self._lookup(context)

    def _lookup(self, context: Context) -> Lookup:
        return Lookup(self._shared, as_text(self._model.context_ids(self._model.fit(context)[0])))

    def step(self, actions: Sequence[str], *, rows: Sequence[int]) -> list[Imagined]:
        worlds = self._model.advance_each([self._worlds[row] for row in rows], actions)
        for row, world, action in zip(rows, worlds, actions, strict=True):
            self._worlds[row] = world
            self._lookups[row].extend(self._model.action_ids(action))
        full = [_full(self._model, world, self._max_new_tokens)[0] for world in worlds]
        room = [row for row, over in zip(rows, full, strict=True) if not over]
        texts_of = [self._worlds[row] for row in room], [self._lookups[row] for row in room]
        decoded = map(_imagined, self._model.decode_each(*texts_of, self._max_new_tokens))
        texts = [Imagined("") if over else next(decoded) for over in full]
        steps = zip(worlds, texts, full, strict=True)
        return [_with_outcomes(self._model, world, [text], [over])[0] for world, text, over in steps]

    def close(self) -> None:
        self._worlds = []


def _full(model: WorldModel, world: World, max_new_tokens: int) -> list[bool]:
    """Tell of each row if an observation of `max_new_tokens` no longer fits."""
    return (world.state.next_position > model.model.config.max_position_embeddings - max_new_tokens).tolist()


def _with_outcomes(model: WorldModel, world: World, texts: Sequence[Imagined], full: Sequence[bool]) -> list[Imagined]:
    """Add what the prediction heads say to the decoded texts."""
    ahead = model.predictions(world) if model.model.config.prediction_heads else None
    rewards = ahead.reward.tolist() if ahead else [None] * len(world)
    continuations = ahead.continuation.tolist() if ahead else [None] * len(world)
    return [
        Imagined("", finish="full") if over else replace(text, reward=reward, continuation=continuation)
        for text, reward, continuation, over in zip(texts, rewards, continuations, full, strict=True)
    ]


def _imagined(decoded: Decoded) -> Imagined:
    if not decoded.ended:
        return Imagined(decoded.text, finish="length")
    return Imagined(decoded.text, trust=exp(decoded.log_probability))
