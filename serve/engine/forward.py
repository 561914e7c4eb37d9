"""The model's passes, and tasks that are made of them.

Everything but the next token of rows that decode is a task: it yields the pass it needs and is sent its result. Passes
of one key are taken together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from loopwm.core import CoreState, ExitRule, Fixed, StateGroup, quick_products
from loopwm.text.model.modeling import LoopWMForCausalLM, LoopWMOutput, States
from loopwm.text.world_batch import row_of
from serve.engine.requests import RequestContext
from serve.engine.requests import Sequence as Row

T = TypeVar("T")

PADDING = 16
"""Rows whose lengths lie in one multiple of it take a pass together: the shorter ones are padded."""


class ForwardBatch(Protocol):
    """A pass of the model that a task asks for. tokens: what it costs."""

    @property
    def key(self) -> Hashable: ...

    @property
    def tokens(self) -> int: ...

    def within(self, tokens: int) -> Self:
        """The pass cut to so many tokens where it can be cut, else itself."""

    def run(self, others: Sequence[Any]) -> list[Any]:
        """Results for itself and for these others, of the same kind and key. What it was made of stays as it is, so
        that it can be repeated."""


ForwardGenerator = Generator[ForwardBatch, Any, T]
"""Work with the model that yields each pass it needs and is sent its result."""


class WorkItem:
    """Work, and who gets its result; nobody once it is cancelled. rows: that will decode when it is done; size: tokens
    whose keys and values it will hold, of so many loops each."""

    def __init__(
        self,
        steps: ForwardGenerator[Any],
        deliver: Callable[[Any], None],
        ctx: RequestContext,
        rows: Sequence[Row] = (),
        size: int = 0,
        loops: int = 1,
    ) -> None:
        self.steps, self.deliver, self.ctx, self.rows = steps, deliver, ctx, rows
        self.size, self.loops = size, loops
        self.asked: ForwardBatch | None = None
        self.begun = self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        return self._cancelled or (bool(self.rows) and all(row.cancelled for row in self.rows))

    def advance(self, result: Any) -> bool:
        """On to the next pass with the result of the last, or what it raised; whether there is a next one. What the
        work raises is its result, which whoever asked for it tells or logs."""
        self.begun = True
        if self.cancelled:
            return False
        try:
            self.asked = self.steps.throw(result) if isinstance(result, Exception) else self.steps.send(result)
        except StopIteration as end:
            self.deliver(end.value)
            return False
        except Exception as error:
            self.deliver(error)
            return False
        return True


def results(passes: Sequence[ForwardBatch]) -> list[Any]:
    """What each of these passes, taken together, came to, or what it raised: where together they fail, each by itself,
    so that nobody gets another's error."""
    first, *others = passes
    try:
        return first.run(others)
    except Exception as error:
        return [error] if not others else [result for one in passes for result in results([one])]


class ModelRunner:
    """A model that appends tokens to states."""

    def __init__(self, model: LoopWMForCausalLM) -> None:
        self.model = model.eval()
        self.device = model.device
        self._token_bytes: dict[int, int] = {}

    def tokens(self, state: States, rows: Sequence[Sequence[int]], depth: ExitRule) -> tuple[Tensor, Tensor]:
        """Appends each row's new tokens; logits (B, V) after the last, and loops (B,)."""
        out = self.run(state, rows, depth)
        assert out.last_hidden_state is not None
        assert out.loops is not None
        with quick_products(len(rows)):
            return self.model.lm_head(out.last_hidden_state[:, -1]), out.loops

    def run(self, state: States, rows: Sequence[Sequence[int]], depth: ExitRule) -> LoopWMOutput:
        """Appends each row's new tokens, padded in front."""
        length = max(map(len, rows))
        tokens_BL = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows], device=self.device)
        valid_BL = torch.tensor([[column >= length - len(row) for column in range(length)] for row in rows])
        positions, mask = state.extend(valid_BL.to(self.device))
        with quick_products(tokens_BL.numel()):
            out: LoopWMOutput = self.model.model(tokens_BL, mask, positions, past_key_values=state, depth=depth)
        return out

    @torch.inference_mode()
    def token_bytes(self, loops: int) -> int:
        """Of the keys and values of a token that loops so often."""
        if loops not in self._token_bytes:
            state = CoreState(1, self.device)
            self.run(state, [[0]], Fixed(loops))
            self._token_bytes[loops] = state.nbytes()
        return self._token_bytes[loops]


@dataclass(frozen=True)
class Appended:
    """state: one row, after the new tokens. hidden, latent, loop_state: theirs, (L, D) each."""

    state: CoreState
    hidden: Tensor
    latent: Tensor
    loop_state: Tensor


@dataclass(frozen=True)
class PrefillChunk:
    """New tokens of one row, or a part of them, that take so many loops. Its result is an `Appended`."""

    forward: ModelRunner
    state: CoreState
    ids: Sequence[int]
    loops: int

    @cached_property
    def key(self) -> Hashable:
        return PrefillChunk, self.loops, -(-len(self.ids) // PADDING)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def within(self, tokens: int) -> PrefillChunk:
        return self if len(self.ids) <= tokens else replace(self, ids=self.ids[: max(tokens, 1)])

    @torch.inference_mode()
    def run(self, others: Sequence[PrefillChunk]) -> list[Appended]:
        every = (self, *others)
        states = [each.state.fork() for each in every]
        together = StateGroup(states) if others else states[0]
        out = self.forward.run(together, [each.ids for each in every], Fixed(self.loops))
        assert out.last_hidden_state is not None
        assert out.latent is not None
        assert out.state is not None
        sides = (out.last_hidden_state, out.latent, out.state)
        return [
            Appended(row_of(states[i], 0), *(side[i, -len(each.ids) :] for side in sides))
            for i, each in enumerate(every)
        ]
