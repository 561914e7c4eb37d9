"""Imagined worlds in this process."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import exp
from pathlib import Path

import torch

from loopwm.core.exit_rules import ExitRule
from loopwm.records.template import LONGEST_OBSERVATION, Context, ContextTooLongError, FormatError
from loopwm.text.decoding import Decoded, MemoryText
from loopwm.text.drafts import Lookup, SharedText, as_text
from loopwm.text.memory import Memory
from loopwm.text.world import World, WorldModel
from loopwm.worlds.protocol import Finish, Imagined, check_lengths, check_rows, longer


class LocalWorlds:
    """Worlds of a checkpoint in this process.

    depth: loops of every pass or an exit rule, None for the checkpoint's default. greedy: decode the most probable
    token at a time, not the likelier of two texts (`loopwm.text.decoding`). memory: outcomes recalled from it compete
    with these texts.
    """

    def __init__(
        self,
        model: WorldModel,
        depth: int | ExitRule | None = None,
        max_new_tokens: int = LONGEST_OBSERVATION,
        greedy: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self._model, self._depth, self._max_new_tokens, self._greedy = model, depth, max_new_tokens, greedy
        self._memory, self._doubt = memory, model.doubt(memory) if memory else 0.0
        self._contexts: list[Context] = []
        self._actions: list[tuple[str, ...]] = []
        self._real: list[World] = []
        self._now: list[World] = []
        self._shared = SharedText()
        self._lookups: list[Lookup] = []

    @classmethod
    def from_pretrained(cls, path: str | Path, device: torch.device | None = None) -> LocalWorlds:
        """Load a checkpoint folder, onto the CPU by default.

        Raises InputError in one line, for a folder that is no checkpoint.
        """
        return cls(WorldModel.from_pretrained(path, device))

    def fresh(self) -> LocalWorlds:
        """Return other worlds of the same model, not begun."""
        return LocalWorlds(self._model, self._depth, self._max_new_tokens, self._greedy, self._memory)

    @property
    def steps_cut(self) -> tuple[int, ...]:
        return tuple(world.steps_cut[0] for world in self._now)

    def begin(self, contexts: Sequence[Context]) -> None:
        check_lengths(len(contexts), Context, contexts=contexts)
        if not contexts:
            raise FormatError("contexts", "must be at least one, got none")
        self._real = [self._model.encode([context], self._depth) for context in contexts]
        self._contexts, self._now = list(contexts), list(self._real)
        self._actions = [()] * len(contexts)
        self._lookups = [self._lookup(context) for context in contexts]

    def restart(self, rows: Sequence[int], contexts: Sequence[Context]) -> None:
        for row, context in zip(rows, contexts, strict=True):
            self._real[row] = self._now[row] = self._model.encode([context], self._depth)
            self._contexts[row], self._lookups[row] = context, self._lookup(context)
            self._actions[row] = ()

    def step(self, actions: Sequence[str], decode: bool = True, rows: Sequence[int] | None = None) -> list[Imagined]:
        if not self._now:
            raise ValueError("step: begin a world first")
        rows = range(len(self._now)) if rows is None else rows
        check_lengths(len(rows), actions=actions)
        worlds = self._model.advance_each([self._now[row] for row in rows], actions)
        for row, world, action in zip(rows, worlds, actions, strict=True):
            self._now[row] = world
            self._actions[row] += (action,)
            self._lookups[row].extend(self._model.action_ids(action))
        longest = self._model.model.config.max_position_embeddings - self._max_new_tokens
        full = [bool(world.state.next_position > longest) for world in worlds]
        seen = [row for row, over in zip(rows, full, strict=True) if decode and not over]
        states, lookups = [self._now[row] for row in seen], [self._lookups[row] for row in seen]
        memory_texts = [self._recall(row) for row in seen]
        decoded = iter(self._model.decode_each(states, lookups, self._max_new_tokens, self._greedy, memory_texts))
        steps = zip(worlds, full, strict=True)
        return [
            Imagined("", finish="full") if over else self._imagined(world, next(decoded) if decode else None)
            for world, over in steps
        ]

    def sample(self, count: int, seed: int = 0) -> list[list[str]]:
        """Draw `count` observations of each row's last step, at temperature 1; the worlds stay as they are."""
        generator = torch.Generator(self._model.model.device).manual_seed(seed)
        repeated = [world for world in self._now for _ in range(count)]
        texts = self._model.sample_each(repeated, generator, self._max_new_tokens)
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    def fork(self, rows: Sequence[int]) -> LocalWorlds:
        check_rows(rows, len(self._contexts))
        fork = self.fresh()
        fork._contexts, fork._real = [self._contexts[row] for row in rows], [self._real[row] for row in rows]
        fork._actions = [self._actions[row] for row in rows]
        fork._now, fork._lookups = [self._now[row] for row in rows], [copy(self._lookups[row]) for row in rows]
        return fork

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        check_lengths(len(self._contexts), actions=actions, observations=observations)
        contexts = [longer(*step) for step in zip(self._contexts, actions, observations, strict=True)]
        self._real = [self._observed(world, context) for world, context in zip(self._real, contexts, strict=True)]
        self._contexts, self._now = contexts, list(self._real)
        self._actions = [()] * len(contexts)
        self._lookups = [self._lookup(context) for context in contexts]

    def close(self) -> None:
        self._real, self._now = [], []

    def _lookup(self, context: Context) -> Lookup:
        return Lookup(self._shared, as_text(self._model.context_ids(self._model.fit(context)[0])))

    def _recall(self, row: int) -> MemoryText | None:
        text = self._memory.recall(self._contexts[row], self._actions[row]) if self._memory else None
        return None if text is None else self._model.memory_text(text, self._doubt)

    def _observed(self, world: World, context: Context) -> World:
        """Append the last step of a context to the world of the others."""
        step = context.history[-1]
        try:
            return self._model.observe(world, [step.action], [step.observation])
        except ContextTooLongError:  # encoding drops the oldest steps
            return self._model.encode([context], self._depth)

    def _imagined(self, world: World, decoded: Decoded | None) -> Imagined:
        reward = continuation = acceptance = expected = trust = None
        if self._model.model.config.prediction_heads:
            ahead = self._model.predictions(world)
            reward, continuation = ahead.reward.item(), ahead.continuation.item()
            acceptance, expected = ahead.acceptance.item(), ahead.expected_reward.item()
        if decoded is None:
            return Imagined("", reward, continuation, acceptance=acceptance, expected_reward=expected)
        if decoded.ended:
            trust = exp(decoded.log_probability)
        finish: Finish = "stop" if decoded.ended else "length"
        return Imagined(decoded.text, reward, continuation, finish, trust, acceptance, expected)
