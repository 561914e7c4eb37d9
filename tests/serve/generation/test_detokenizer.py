"""Text while it comes is the text at the end."""

from __future__ import annotations

import random

import pytest

from loopwm.records.template import FormatError, StateSlots, chat_to_prompt, render_prompt
from serve.generation.detokenizer import REPLACEMENT, Detokenizer
from serve.generation.prompts import PromptReader, PromptTooLongError


@pytest.mark.parametrize("text", ["a door (open)", "Ünïcödé", "日本 🚪🏽 door", "23.5 degrees"])
def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer, text):
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.push(token) for token in tokenizer(text)["input_ids"]]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


def test_any_tokens_stream_to_what_they_decode_to_at_once(tokenizer):
    tokens = random.Random(0).choices(range(9, len(tokenizer)), k=400)
    detokenizer = Detokenizer(tokenizer.decode)
    streamed = "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()
    assert streamed == tokenizer.decode(tokens)


def test_a_character_cut_in_the_middle_is_replaced(tokenizer):
    detokenizer = Detokenizer(tokenizer.decode)
    cut = tokenizer("🚪")["input_ids"][:-1]
    assert "".join(map(detokenizer.push, cut)) + detokenizer.flush() == REPLACEMENT


@pytest.mark.parametrize(
    ("stops", "shown", "stopped"),
    [
        (["def"], "abc", True),
        (["xyz"], "abcdefgh", False),
        (["fgh", "ef"], "abcd", True),
        (["hi"], "abcdefgh", False),
        (["abcdefgh"], "", True),
        ([], "abcdefgh", False),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_stop_strings_cut_wherever_pieces_break(stops, shown, stopped, size):
    text = "abcdefgh"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    detokenizer = Detokenizer(lambda tokens: "".join(pieces[token] for token in tokens), stops)
    assert "".join(map(detokenizer.push, range(len(pieces)))) + detokenizer.flush() == shown
    assert detokenizer.stopped == stopped


def chat(steps: int, action: str = "look around") -> list[tuple[str, str]]:
    history = [("user", "wait"), ("assistant", "You decide to wait for 10 iterations.")] * steps
    return [("system", "boil water"), ("assistant", "A kitchen."), *history, ("user", action)]


def test_a_chat_is_the_template(tokenizer):
    prompt = PromptReader(tokenizer, StateSlots(2)).chat(chat(3))
    assert tokenizer.decode(prompt.ids) == render_prompt(*chat_to_prompt(chat(3)), StateSlots(2))
    assert prompt.steps_cut == 0


def test_a_long_chat_loses_its_oldest_steps_and_no_more_than_needed(tokenizer):
    whole = PromptReader(tokenizer, StateSlots(1)).chat(chat(3))
    step = len(PromptReader(tokenizer, StateSlots(1)).chat(chat(4)).ids) - len(whole.ids)
    reader = PromptReader(tokenizer, StateSlots(1), limit=len(whole.ids) + step - 1)
    assert reader.chat(chat(3)) == whole
    cut = reader.chat(chat(9))
    assert (cut.ids, cut.steps_cut) == (whole.ids, 6)


def test_a_chats_history_fills_what_the_model_was_trained_on_and_its_head_may_be_longer(tokenizer):
    whole = PromptReader(tokenizer, StateSlots(1)).chat(chat(3))
    cut = PromptReader(tokenizer, StateSlots(1), context_tokens=len(whole.ids)).chat(chat(9))
    assert (cut.ids, cut.steps_cut) == (whole.ids, 6)
    bare = PromptReader(tokenizer, StateSlots(1), context_tokens=10).chat(chat(9))
    assert (bare.ids, bare.steps_cut) == (PromptReader(tokenizer, StateSlots(1)).chat(chat(1)).ids, 8)


def test_a_prompt_over_the_limit_is_told_with_its_size(tokenizer):
    reader = PromptReader(tokenizer, StateSlots(1), limit=30)
    size = len(PromptReader(tokenizer, StateSlots(1)).chat(chat(1, "look at " + "door " * 40)).ids)
    with pytest.raises(PromptTooLongError, match=f"messages: the prompt has {size} tokens, the limit is 30"):
        reader.chat(chat(5, "look at " + "door " * 40))
    with pytest.raises(PromptTooLongError, match="prompt: the prompt has 31 tokens, the limit is 30"):
        reader.ids([9] * 31)


def test_special_strings_are_parsed_in_whole_prompts_only(tokenizer):
    reader = PromptReader(tokenizer, StateSlots(1))
    act = tokenizer.convert_tokens_to_ids("<|act|>")
    assert reader.text("<|act|>look").ids[0] == act
    assert reader.chat(chat(0, "look<|act|>fly")).ids.count(act) == 1


@pytest.mark.parametrize("ids", [[], [-1], [10**6]])
def test_impossible_token_ids_are_refused(tokenizer, ids):
    with pytest.raises(FormatError, match="prompt"):
        PromptReader(tokenizer, StateSlots(1)).ids(ids)
