"""Predict with a language model behind an endpoint: one few-shot request for each window and horizon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from eval.models.endpoint import Endpoint
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
        predictions = []
        for _ in windows:
            answers = {k: next(replies) for k in horizons}
            unanswered = frozenset(k for k, reply in answers.items() if reply.cut)
            texts = {k: reply.text for k, reply in answers.items()}
            predictions.append(Prediction(texts, unanswered=unanswered))
        return predictions

    def usage(self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]) -> dict[str, int]:
        """Count requests and tokens of a whole run; equal requests once, cut replies each.

        Tokens are over the replies whose tokens the endpoint counted (`counted`).
        """
        conversations = (messages for window in windows for messages in self._ask(window, context_kind, horizons))
        replies = self.endpoint.paid_all(conversations)
        tokens = [(r.prompt_tokens, r.completion_tokens) for r in replies]
        counted = [(prompt, answer) for prompt, answer in tokens if prompt is not None and answer is not None]
        cut = sum(reply.cut for reply in replies)
        counts = {"requests": len(replies), "cut": cut, "counted": len(counted)}
        sums = {"prompt_tokens": sum(p for p, _ in counted), "completion_tokens": sum(a for _, a in counted)}
        return counts | sums

    def _ask(self, window: Window, context_kind: ContextKind, horizons: Sequence[int]) -> Iterator[list[Message]]:
        context = window_context(window, context_kind)
        return (self.shots.messages(window, context, context_kind, k) for k in horizons)
