"""OpenAI's responses: the client that has them reads them, and what needs storage or tools is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from loopwm.records.template import ContextTooLongError, FormatError
from serve.generation.prompts import PromptTooLongError
from serve.generation.service import CompletionTooLongError, EngineUnsupportedError
from serve.http.responses import ResponseBody, naming_fields
from tests.serve.http.test_http import check_error

Json = dict[str, Any]


@pytest.fixture
def api(client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
def body(chat) -> Json:
    """Return the chat as a body of a response."""
    _, *messages = chat["messages"]
    return {"model": "tiny", "instructions": chat["messages"][0]["content"], "input": messages, "max_output_tokens": 12}


def test_response_text_is_that_of_the_chat(api, chat, body):
    expected = api.chat.completions.create(**chat)
    response = api.responses.create(**body, metadata={"run": "1"})
    assert response.output_text == expected.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert response.metadata == {"run": "1"}


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.3, "top_p": 0.9, "extra_body": {"seed": 5}}])
def test_response_stream_joins_to_the_whole_one(api, body, fields):
    whole = api.responses.create(**body, **fields)
    *events, last = api.responses.create(**body, **fields, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert last.response.output_text == whole.output_text
    assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))
    kinds = [event.type.removeprefix("response.") for event in (*events, last)]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]


def test_response_that_ends_before_its_limit_is_completed(api, body):
    text = api.responses.create(**body).output_text
    response = api.responses.create(**body, extra_body={"stop": text[2:5]})
    assert (response.output_text, response.status, response.incomplete_details) == (text[:2], "completed", None)


def test_response_and_events_have_openais_shape(client, body):
    reply = client.post("/v1/responses", json=body)
    Response.model_validate_json(reply.content, strict=True)
    lines = client.post("/v1/responses", json={**body, "stream": True}).text.strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        name, data = line.split("\n")
        event = TypeAdapter(ResponseStreamEvent).validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"


def test_response_input_takes_earlier_output_and_parts(api, chat, body):
    first = api.responses.create(**body)
    asked = {"role": "user", "content": [{"type": "input_text", "text": "look around"}], "type": "message"}
    again = api.responses.create(**{**body, "input": [*body["input"][:2], first.output[0], asked]})
    talk = [*chat["messages"][:3], {"role": "assistant", "content": first.output_text}]
    talk.append({"role": "user", "content": "look around"})
    expected = api.chat.completions.create(**{**chat, "messages": talk})
    assert again.output_text == expected.choices[0].message.content


def test_response_without_instructions_takes_the_system_message(client, chat, body):
    expected = client.post("/v1/responses", json=body).json()["output"][0]["content"]
    given = {**body, "instructions": None, "input": chat["messages"]}
    assert client.post("/v1/responses", json=given).json()["output"][0]["content"] == expected


TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": True}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", ["not supported; leave it out"]),
        ({"conversation": "conv_1"}, "conversation", ["not supported"]),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", ["not supported"]),
        ({"reasoning": {"effort": "low"}}, "reasoning", ["not supported"]),
        ({"tools": [TOOL]}, "tools", ["not supported; leave it out"]),
        ({"tool_choice": "required"}, "tool_choice", ["none", "auto"]),
        ({"store": True}, "store", ["False"]),
        ({"background": True}, "background", ["False"]),
        ({"truncation": "disabled"}, "truncation", ["auto"]),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", []),
        ({"text": {"format": {"type": "json_object"}}}, "text.format.type", ["text"]),
        ({"input": "open door"}, "input", ["assistant", "['system', 'user']"]),
        ({"input": [{"role": "assistant", "content": "o"}, {"role": "tool", "content": "x"}]}, "input[1].role", []),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].role", ["required"]),
        ({"instructions": "water " * 3000}, "input", ["2048"]),
        ({"max_output_tokens": 10**6}, "max_output_tokens", ["1000000"]),
        ({"n": 2}, "n", ["1"]),
    ],
)
def test_response_field_that_is_not_supported_is_named(client, body, fields, param, words):
    check_error(client.post("/v1/responses", json={**body, **fields}), 400, param, *words)


def test_response_message_out_of_turn_is_named_without_instructions(client, body):
    talk = [{"role": role, "content": "x"} for role in ("system", "assistant", "tool")]
    check_error(client.post("/v1/responses", json={**body, "instructions": None, "input": talk}), 400, "input[2].role")


def test_response_stream_that_fails_is_an_error_of_the_client(serving, tiny_model, body, monkeypatch):
    forward, calls = type(tiny_model.model).forward, []

    def fails_later(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs) if len(calls) < 20 else 1 / 0

    with serving(tiny_model) as client, openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as api:
        monkeypatch.setattr(type(tiny_model.model), "forward", fails_later)
        with pytest.raises(openai.APIError, match="The service failed"):
            list(api.responses.create(**{**body, "max_output_tokens": 60, "temperature": 1}, stream=True))


def test_responses_are_not_stored(client, body):
    name = client.post("/v1/responses", json=body).json()["id"]
    check_error(client.get(f"/v1/responses/{name}"), 404, None)


def test_response_errors_keep_their_kind_and_get_this_bodys_fields():
    body = ResponseBody(model="tiny", input="x")
    for error, kind, told in (
        (EngineUnsupportedError("depth", "is not for it"), EngineUnsupportedError, "depth: is not for it"),
        (FormatError("messages[1].role", "is wrong"), FormatError, r"input\[1\].role: is wrong"),
        (PromptTooLongError("messages", 9, 8), ContextTooLongError, "input: the prompt has 9 tokens"),
        (CompletionTooLongError("max_tokens: is 9"), ContextTooLongError, "max_output_tokens: is 9"),
    ):
        with pytest.raises(kind, match=told) as caught, naming_fields(body):
            raise error
        assert type(caught.value) is kind
