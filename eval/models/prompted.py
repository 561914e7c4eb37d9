"""Predict with a language model behind an endpoint: one few-shot request for each window and horizon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eval.models.endpoint import Endpoint, Reply
from eval.models.fewshot import Message, Shots
from eval.scores.predictions import Prediction
from loopwm.records.template import ContextKind, window_context
from loopwm.records.windows import Window


@dataclass(frozen=True)
class EndpointPredictor:
    endpoint: Endpoint
    shots: Shots

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {**self.shots.identity, **self.endpoint.parameters.body}

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        conversations = [messages for window in windows for messages in self._ask(window, context_kind, horizons)]
        replies = iter(self.endpoint.complete_all(conversations))
        return [_prediction({k: next(replies) for k in horizons}) for _ in windows]

    def usage(self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]) -> dict[str, int]:
        """Count requests and tokens of a whole run; equal requests once, cut replies each.

        Tokens are over the replies whose tokens the endpoint counted (`counted`).
        """
        conversations = (messages for window in windows for messages in self._ask(window, context_kind, horizons))
        replies = self.endpoint.paid_all(conversations)
        counted = [r for r in replies if r.prompt_tokens is not None and r.completion_tokens is not None]
        prompt, completion = _total(counted, "prompt_tokens"), _total(counted, "completion_tokens")
        cut = sum(reply.cut for reply in replies)
        counts = {"requests": len(replies), "cut": cut, "counted": len(counted)}
        return {**counts, "prompt_tokens": prompt, "completion_tokens": completion}

    def _ask(self, window: Window, context_kind: ContextKind, horizons: Sequence[int]) -> Iterator[list[Message]]:
        context = window_context(window, context_kind)
        return (self.shots.messages(window, context, context_kind, k) for k in horizons)


def _prediction(replies: Mapping[int, Reply]) -> Prediction:
    """Build a prediction from the replies by horizon."""
    unanswered = frozenset(k for k, reply in replies.items() if reply.cut)
    return Prediction({k: reply.text for k, reply in replies.items()}, unanswered=unanswered)


def _total(replies: Sequence[Reply], field: str) -> int:
    return sum(getattr(reply, field) for reply in replies)
