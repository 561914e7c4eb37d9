"""Prompts as token ids: from a chat through the template, or handed over whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from loopwm.records import template
from loopwm.records.template import ContextTooLongError, FormatError, StateSlots


class PromptTooLongError(ContextTooLongError):
    """More tokens than a prompt may have. `field` names the part of the request."""

    def __init__(self, field: str, tokens: int, limit: int) -> None:
        super().__init__(field, f"the prompt has {tokens} tokens, the limit is {limit}")


@dataclass(frozen=True)
class Prompt:
    """ids: token ids. steps_cut: old steps of a chat that were dropped so that it fits."""

    ids: tuple[int, ...]
    steps_cut: int = 0


class PromptReader:
    """Turns what a request brings into a Prompt of at most `limit` tokens. context_tokens: up to which a chat's history
    fills it (`LoopWMConfig.context_tokens`)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        slots: StateSlots,
        limit: int = template.CONTEXT_LIMIT,
        context_tokens: int = template.CONTEXT_LIMIT,
    ) -> None:
        self.limit = limit
        self._context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._slots = slots

    def with_limit(self, limit: int) -> PromptReader:
        return PromptReader(self._tokenizer, self._slots, limit, self._context_tokens)

    def chat(self, messages: Sequence[tuple[str, str]]) -> Prompt:
        """The prompt of (role, text) messages; text can not spell special tokens.

        Raises FormatError naming the message at fault; PromptTooLongError if even without its history it is too long.
        """
        context, actions = template.chat_to_prompt(messages)
        asked = "".join(template.render_step(action, self._slots) for action in actions) + template.OBS
        after = len(self.encode(self._slots.after_context + asked))
        room, filled = self.limit - after, self._context_tokens - after
        try:
            context, cut = template.fit_context(context, lambda text: len(self.encode(text)), room, self._slots, filled)
        except ContextTooLongError as error:
            shortest = template.render_prompt(replace(context, history=()), actions, self._slots)
            raise PromptTooLongError("messages", len(self.encode(shortest)), self.limit) from error
        return Prompt(tuple(self.encode(template.render_prompt(context, actions, self._slots))), cut)

    def text(self, text: str) -> Prompt:
        """A whole prompt; special strings such as `<|act|>` become special tokens. Raises as `ids` does."""
        return self.ids(self.encode(text))

    def ids(self, ids: Sequence[int]) -> Prompt:
        """A whole prompt in token ids. Raises FormatError for none or unknown ones, PromptTooLongError."""
        if not ids:
            raise FormatError("prompt", "must not be empty")
        if len(ids) > self.limit:
            raise PromptTooLongError("prompt", len(ids), self.limit)
        self.check_ids("prompt", ids)
        return Prompt(tuple(ids))

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Raises FormatError for an id that no token has."""
        if ids and (min(ids) < 0 or max(ids) >= len(self._tokenizer)):
            raise FormatError(field, f"token ids must be 0 .. {len(self._tokenizer) - 1}")

    def encode(self, text: str) -> list[int]:
        """Token ids of any length; special strings become special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
