"""Unchanged clients understand the service: what they return is what a plain request returns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("langchain_openai")
litellm = pytest.importorskip("litellm")

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAI  # noqa: E402

from tests.conformance.conftest import MODEL  # noqa: E402

pytestmark = pytest.mark.conformance

SAID = {"system": SystemMessage, "assistant": AIMessage, "user": HumanMessage}
PROMPT = "<|goal|>boil water<|obs|>A kitchen.<|end|><|state|><|act|>look around<|state|><|obs|>"


@pytest.fixture
def api(base) -> Any:
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def expected(api, messages) -> str:
    text = api.chat.completions.create(model=MODEL, messages=messages, max_tokens=40).choices[0].message.content
    assert text
    return text


def test_openai_streams_with_usage_and_scores(api, messages, expected):
    chunks = list(
        api.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=40, stream=True, stream_options={"include_usage": True},
            logprobs=True, top_logprobs=2,
        )
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected
    scored = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert len(scored) == chunks[-1].usage.completion_tokens
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in scored)


def test_openai_asks_for_many_at_once(base, messages, expected):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            create = client.chat.completions.create
            answers = [create(model=MODEL, messages=messages, max_tokens=40, n=2) for _ in range(4)]
            return [choice.message.content for answer in await asyncio.gather(*answers) for choice in answer.choices]

    assert set(asyncio.run(ask())) == {expected}


def test_openai_completions_echo_scores(api):
    choice = api.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=3, max_tokens=0).choices[0]
    assert choice.text == PROMPT
    assert choice.logprobs.token_logprobs[0] is None
    assert all(score <= 0 for score in choice.logprobs.token_logprobs[1:])


def test_openai_tells_errors_apart(api, messages):
    with pytest.raises(openai.NotFoundError) as caught:
        api.chat.completions.create(model="gpt", messages=messages)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model=MODEL, messages=messages, presence_penalty=1)
    assert caught.value.param == "presence_penalty"


@pytest.mark.parametrize("streaming", [False, True])
def test_langchain_chats(base, messages, expected, streaming):
    chat = ChatOpenAI(model=MODEL, base_url=base, api_key="none", max_tokens=40, streaming=streaming, max_retries=0)
    asked = [SAID[message["role"]](message["content"]) for message in messages]
    answer = chat.invoke(asked)
    assert answer.content == expected
    assert "".join(piece.content for piece in chat.stream(asked)) == expected
    assert [found.content for found in chat.batch([asked, asked])] == [expected] * 2


def test_langchain_completes(base, api):
    expected = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0).choices[0].text
    complete = OpenAI(model=MODEL, base_url=base, api_key="none", max_tokens=30, temperature=0, max_retries=0)
    assert complete.invoke(PROMPT) == expected
    assert "".join(complete.stream(PROMPT)) == expected


def test_litellm_chats_and_streams(base, messages, expected):
    ask = {"model": f"openai/{MODEL}", "messages": messages, "api_base": base, "api_key": "none", "max_tokens": 40}
    assert litellm.completion(**ask).choices[0].message.content == expected
    chunks = litellm.completion(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**ask, "messages": messages[:1]})
