"""Prompts as token ids: rendered from a chat by the template, or given whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from loopwm.records import template
from loopwm.records.template import ContextTooLongError, FormatError, StateSlots


class PromptTooLongError(ContextTooLongError):
    """The prompt exceeds the limit. field: field of the request at fault."""

    def __init__(self, field: str, tokens: int, limit: int) -> None:
        super().__init__(field, f"the prompt has {tokens} tokens, the limit is {limit}")


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request.

    ids: token ids.
    steps_cut: oldest steps of a chat, dropped to fit the context.
    foreign: a chat is worded unlike every training episode (`WorldModel.is_foreign`).
    """

    ids: tuple[int, ...]
    steps_cut: int = 0
    foreign: bool = False


@dataclass(frozen=True, eq=False)
class PromptReader:
    """Reader of prompts of at most `limit` tokens.

    context_tokens: tokens up to which a chat's history may fill the prompt (`LoopWMConfig.context_tokens`).
    is_foreign: as `WorldModel.is_foreign`.
    """

    tokenizer: PreTrainedTokenizerFast
    slots: StateSlots
    limit: int = template.CONTEXT_LIMIT
    context_tokens: int = template.CONTEXT_LIMIT
    is_foreign: Callable[[str, str], bool] = lambda goal, observation: False

    def chat(self, messages: Sequence[tuple[str, str]]) -> Prompt:
        """Render the prompt of (role, text) messages; special tokens in user text are escaped.

        Raises:
            FormatError: names the invalid message.
            PromptTooLongError: the prompt without its history is too long.
        """
        context, actions = template.chat_to_prompt(messages)
        deferred = "".join(template.render_step(action, self.slots) for action in actions) + template.OBS
        after = len(self.encode(self.slots.after_context + deferred))
        room, context_room = self.limit - after, self.context_tokens - after
        try:
            context, cut = template.fit_context(
                context, lambda text: len(self.encode(text)), room, self.slots, context_room
            )
        except ContextTooLongError as error:
            shortest = template.render_prompt(replace(context, history=context.history[-1:]), actions, self.slots)
            raise PromptTooLongError("messages", len(self.encode(shortest)), self.limit) from error
        ids = tuple(self.encode(template.render_prompt(context, actions, self.slots)))
        return Prompt(ids, cut, self.is_foreign(context.goal, context.observation))

    def text(self, text: str) -> Prompt:
        """Tokenize a whole prompt; strings such as `<|act|>` become special tokens. Raises like `ids`."""
        return self.ids(self.encode(text))

    def ids(self, ids: Sequence[int]) -> Prompt:
        """Check a whole prompt of token ids. Raises FormatError or PromptTooLongError."""
        if not ids:
            raise FormatError("prompt", "must not be empty")
        if len(ids) > self.limit:
            raise PromptTooLongError("prompt", len(ids), self.limit)
        self.check_ids("prompt", ids)
        return Prompt(tuple(ids))

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Raise FormatError for an id outside the vocabulary."""
        if ids and (min(ids) < 0 or max(ids) >= len(self.tokenizer)):
            raise FormatError(field, f"token ids must be 0 .. {len(self.tokenizer) - 1}")

    def encode(self, text: str) -> list[int]:
        """Tokenize text of any length; special strings become special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
