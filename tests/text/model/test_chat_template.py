"""The chat template renders what the service renders, for every kind of slots."""

from __future__ import annotations

import pytest
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from loopwm.records.template import StateSlots, chat_to_prompt, render_prompt
from loopwm.text.model.chat_template import chat_template
from loopwm.text.model.tokenizer import load_tokenizer

OPENING = [("system", " boil <|end|> water\n"), ("assistant", "This is the kitchen.\nIt is  warm. ")]
SEEN = [("user", "open <|obs|> oven"), ("assistant", "The oven is now open.")]
CHATS = [
    [*OPENING, ("user", "wait")],
    [*OPENING, ("user", "wait"), ("user", " look around "), ("user", "it's {{ 7 * 7 }}")],
    [*OPENING, *SEEN, ("user", "wait"), ("assistant", ""), ("user", "look around"), ("user", "wait")],
]


@pytest.fixture(params=[StateSlots(1, True), StateSlots(2, True), StateSlots(2, False)], ids=str)
def slots(request: pytest.FixtureRequest) -> StateSlots:
    slots: StateSlots = request.param
    return slots


@pytest.fixture
def tokenizer(slots: StateSlots) -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = chat_template(slots)
    return tokenizer


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in chat]


@pytest.mark.parametrize("chat", CHATS)
def test_chat_template_equals_the_services_prompt(
    tokenizer: PreTrainedTokenizerFast, slots: StateSlots, chat: list[tuple[str, str]]
) -> None:
    prompt = render_prompt(*chat_to_prompt(chat), slots)
    assert tokenizer.apply_chat_template(messages(chat), tokenize=False, add_generation_prompt=True) == prompt


@pytest.mark.parametrize("chat", [OPENING, CHATS[0][1:], [*CHATS[0], ("tool", "x")]])
def test_chat_template_refuses_other_roles(tokenizer: PreTrainedTokenizerFast, chat: list[tuple[str, str]]) -> None:
    with pytest.raises(TemplateError, match="messages"):
        tokenizer.apply_chat_template(messages(chat), tokenize=False, add_generation_prompt=True)
