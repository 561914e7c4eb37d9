"""Beam search as an engine work item: one forward batch extends all beams, shared with other searches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loopwm.core import ExitRule, KVCache, RaggedBatch
from loopwm.text.decoding import Extended, Extension, Hypothesis, search_beams
from serve.engine.forward import ForwardGenerator, ModelRunner
from serve.engine.requests import Event, Finish, Request


@dataclass(frozen=True, eq=False)
class ExtendBeams:
    """Forward of one token for each beam of a search; returns an `Extended`."""

    runner: ModelRunner
    extension: Extension
    depth: ExitRule

    @property
    def key(self) -> Hashable:
        return ExtendBeams, self.depth

    @property
    def num_tokens(self) -> int:
        return len(self.extension.tokens)

    def split(self, max_tokens: int) -> ExtendBeams:
        return self

    @torch.inference_mode()
    def run(self, others: Sequence[ExtendBeams]) -> list[Extended]:
        extensions = [each.extension for each in (self, *others)]
        states = [each.state.fork() for each in extensions]
        tokens = [[token] for each in extensions for token in each.tokens]
        logits_BV, loops_B = self.runner.decode(RaggedBatch(states), tokens, self.depth)
        sizes = [len(each.tokens) for each in extensions]
        parts = zip(states, logits_BV.split(sizes), loops_B.split(sizes), strict=True)
        return [Extended(state, logits, loops.tolist()) for state, logits, loops in parts]


def search(
    runner: ModelRunner, state: KVCache, request: Request, beams: int, end_token: int
) -> ForwardGenerator[list[Hypothesis]]:
    """Return the `beams` best results of a search with that number of beams.

    state: KV cache before the last token of the prompt.
    """
    assert request.params.max_tokens is not None
    searching = search_beams(state, request.prompt[-1], beams, request.params.max_tokens, end_token, results=beams)
    extension = next(searching)
    while True:
        extended: Any = yield ExtendBeams(runner, extension, request.depth)
        try:
            extension = searching.send(extended)
        except StopIteration as stop:
            best: list[Hypothesis] = stop.value
            return best


def deliver(request: Request, hypothesis: Hypothesis) -> None:
    """Emit all tokens of a hypothesis, and its end."""
    events = [Event(token, loops) for token, loops in zip(hypothesis.tokens, hypothesis.loops, strict=False)]
    last = Event(loops=hypothesis.loops[-1]) if hypothesis.ended else events.pop()
    finish = Finish.STOP if hypothesis.ended else Finish.LENGTH
    for event in (*events, Event(last.token, last.loops, finish=finish)):
        request.deliver(event)
