"""The endpoints over a real socket."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from serve.http.middleware import BODY_LIMIT
from serve.http.replies import FOREIGN
from serve.limits import Limits
from tests.fixtures.service import wait_until


def events(client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream, which has to end with [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def completion(client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"model": "tiny", "prompt": "<|goal|>boil water", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def text_of(client, **fields: Any) -> str:
    return completion(client, **fields)["choices"][0]["text"]


def test_a_model_of_several_names_answers_to_all_by_the_first(serving, tiny_model):
    with serving(tiny_model, names=("one", "lab/two")) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "lab/two"]
        for path in ("lab/two", "lab%2Ftwo"):
            assert client.get(f"/v1/models/{path}").json()["id"] == "lab/two"
        answer = client.post("/v1/completions", json={"model": "lab/two", "prompt": "boil", "max_tokens": 2})
        assert answer.json()["model"] == "one"
        check_error(client.get("/v1/models/gpt"), 404, "model", "this service has 'one', 'lab/two'")


def test_models_and_health(client):
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["object"] == "model"
    assert client.get("/health").json()["status"] == "ok"


def test_a_chat_reply_has_openais_shape(client, chat):
    reply = client.post("/v1/chat/completions", json=chat).json()
    choice = reply["choices"][0]
    assert reply["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["finish_reason"], reply["steps_cut"]) == ("length", 0)


def test_a_chat_and_a_world_worded_unlike_all_training_say_so(client, tiny_model, chat, monkeypatch):
    new = {"model": "tiny", "goal": "Your task is to list the files.", "observation": "total 12"}
    assert client.post("/v1/chat/completions", json=chat).json()["warnings"] == []
    monkeypatch.setattr(tiny_model.config, "tokens_per_byte", 1e-6)
    replies = [client.post("/v1/chat/completions", json=chat).json(), client.post("/v1/worlds", json=new).json()]
    replies.append(events(client, "/v1/chat/completions", chat)[0])
    assert [reply["warnings"] for reply in replies] == [[FOREIGN]] * 3


def test_usage_counts_tokens_and_loops(client, tiny_model, tokenizer, chat):
    prompt = "<|goal|>boil water<|obs|>"
    usage = completion(client, prompt=prompt, max_tokens=7)["usage"]
    expected = len(tokenizer(prompt)["input_ids"])
    loops = usage.pop("loops")
    assert usage == {"prompt_tokens": expected, "completion_tokens": 7, "total_tokens": expected + 7}
    assert loops == tiny_model.config.default_depth
    last = events(client, "/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}})[-1]
    assert last["choices"] == []
    assert last["usage"] == client.post("/v1/chat/completions", json=chat).json()["usage"]


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.3, "seed": 5}, {"stop": ["e", "o"]}])
def test_the_streamed_text_is_the_plain_text(client, chat, fields):
    body = {**chat, "max_tokens": 40, **fields}
    plain = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    choices = [event["choices"][0] for event in events(client, "/v1/chat/completions", body)]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == plain["message"]["content"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [plain["finish_reason"]]
    body = {"model": "tiny", "prompt": "boil", "max_tokens": 40, **fields}
    streamed = "".join(event["choices"][0]["text"] for event in events(client, "/v1/completions", body))
    assert streamed == text_of(client, **body)


def test_a_stop_string_ends_the_text_before_it(client):
    free = text_of(client, max_tokens=40)
    stop = free[10:13]
    cut = completion(client, max_tokens=40, stop=stop)
    assert cut["choices"][0]["text"] == free[: free.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 40


def test_a_seed_fixes_the_text_whatever_else_is_running(client):
    request = {"max_tokens": 25, "temperature": 2.0, "top_p": 0.95, "seed": 11}
    alone = text_of(client, **request)
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(text_of, client, max_tokens=10 + i, temperature=1.0, prompt="x" * i) for i in range(1, 9)]
        crowded = list(pool.map(lambda _: text_of(client, **request), range(4)))
    assert {alone, *crowded} == {alone}
    assert all(other.result() for other in others)
    assert text_of(client, **{**request, "seed": 12}) != alone


def test_without_temperature_the_text_is_greedy(client):
    assert text_of(client, max_tokens=20) == text_of(client, max_tokens=20, temperature=0, seed=3)


def test_prompts_may_be_several_and_may_be_token_ids(client, tokenizer):
    texts = ["open door", "<|act|>look"]
    single = [text_of(client, prompt=text, max_tokens=9) for text in texts]
    for prompts in (texts, [tokenizer(text)["input_ids"] for text in texts]):
        body = {"model": "tiny", "prompt": prompts, "max_tokens": 9}
        choices = completion(client, **body)["choices"]
        assert [choice["text"] for choice in choices] == single
        assert [choice["index"] for choice in choices] == [0, 1]
        streamed = ["", ""]
        for event in events(client, "/v1/completions", body):
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert streamed == single
    assert text_of(client, prompt=tokenizer(texts[1])["input_ids"], max_tokens=9) == single[1]


def test_nulls_count_as_absent_and_unknown_fields_are_ignored(client, chat):
    plain = client.post("/v1/chat/completions", json=chat).json()
    nulls = dict.fromkeys(
        ["temperature", "top_p", "seed", "stop", "n", "stream", "stream_options", "tools", "logprobs", "top_logprobs",
         "depth", "top_k", "min_p", "min_tokens", "ignore_eos", "return_token_ids", "logit_bias", "response_format"]
    )  # fmt: skip
    zeros = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "top_k": 0, "min_p": 0, "min_tokens": 0, "temperature": 0,
        "logit_bias": {}, "tools": [], "stop": [], "repetition_penalty": 1, "n": 1, "top_p": 1,
        "use_beam_search": False,
    }  # fmt: skip
    for fields in (nulls, zeros):
        reply = client.post("/v1/chat/completions", json={**chat, **fields, "user": "me", "invented": [1]}).json()
        assert reply["choices"] == plain["choices"]


def test_content_may_come_in_parts_and_the_newer_name_of_max_tokens_wins(client, chat):
    plain = client.post("/v1/chat/completions", json={**chat, "max_tokens": 5}).json()
    chat["messages"][0]["content"] = [
        {"type": "text", "text": "Your task is "},
        {"type": "text", "text": "to boil water."},
    ]
    reply = client.post("/v1/chat/completions", json={**chat, "max_completion_tokens": 5}).json()
    assert (reply["choices"], reply["usage"]) == (plain["choices"], plain["usage"])


def test_a_chat_can_not_spell_special_tokens(client, chat, tokenizer):
    before = client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"]
    chat["messages"][-1]["content"] += "<|act|>"
    after = client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"]
    assert after - before == len(tokenizer("< |act|>")["input_ids"]) > 1
    raw = [completion(client, prompt=text, max_tokens=1)["usage"]["prompt_tokens"] for text in ("look", "look<|act|>")]
    assert raw[1] - raw[0] == 1


def test_the_openai_client_understands_replies_streams_and_errors(client, chat):
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
        text = api.chat.completions.create(**chat).choices[0].message.content
        chunks = api.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        with pytest.raises(openai.NotFoundError) as caught:
            api.chat.completions.create(**{**chat, "model": "other"})
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def check_error(response, status: int, param: str | None, *words: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert all(word in error["message"] for word in words), error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", ["expected"]),
        ({"messages": [{"role": "system", "content": "g"}, {"role": "assistant", "content": "o"}]}, "messages", []),
        ({"messages": "hello"}, "messages", ["list"]),
        ({"messages": [{"role": "system"}]}, "messages[0].content", ["required"]),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content", ["string"]),
        ({"n": 0}, "n", ["1"]),
        ({"n": 65}, "n", ["65", "64"]),
        ({"top_k": -2}, "top_k", ["-1"]),
        ({"min_p": 1.5}, "min_p", ["1"]),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ["20"]),
        ({"top_logprobs": 2}, "top_logprobs", ["logprobs"]),
        ({"min_tokens": 20}, "min_tokens", ["12"]),
        ({"depth": 99}, "depth", ["99"]),
        ({"depth": {"rule": "convergence", "eps": 0, "limit": 2}}, "depth", ["eps"]),
        ({"depth": {"rule": "gate", "tau": 0.5, "limit": 2}}, "depth", ["gate"]),
        ({"depth": {"rule": "random", "probability": 0.5, "limit": 2, "seed": 0}}, "depth", ["random"]),
        ({"response_format": {"type": "json_object"}}, "response_format.type", ["text"]),
        ({"temperature": -1}, "temperature", ["0"]),
        ({"temperature": "hot"}, "temperature", ["number"]),
        ({"top_p": 0}, "top_p", ["0"]),
        ({"stop": list("abcde")}, "stop", ["4"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type", ["text"]),
        ({"max_tokens": 0}, "max_tokens", ["1"]),
        ({"max_tokens": 10**6}, "max_tokens", ["1000000", "4096"]),
        ({"presence_penalty": 0.5}, "presence_penalty", []),
        ({"use_beam_search": True}, "use_beam_search", ["False"]),
        ({"model": None}, "model", ["string"]),
    ],
)
def test_a_bad_field_of_a_chat_is_named(client, chat, fields, param, words):
    check_error(client.post("/v1/chat/completions", json={**chat, **fields}), 400, param, *words)


def test_chat_developer_role_is_the_system_role(client, chat):
    expected = client.post("/v1/chat/completions", json=chat).json()["choices"]
    chat["messages"][0]["role"] = "developer"
    assert client.post("/v1/chat/completions", json=chat).json()["choices"] == expected


def test_request_past_its_deadline_is_a_server_error(client, chat):
    late = client.post("/v1/chat/completions", json=chat, headers={"X-Request-Timeout": "0.000001"})
    check_error(late, 504, None, "deadline")
    assert late.json()["error"]["type"] == "server_error"


def test_an_action_that_is_missing_empty_or_out_of_turn_is_named(client, chat):
    def post() -> Any:
        return client.post("/v1/chat/completions", json=chat)

    chat["messages"][3]["content"] = "  "
    check_error(post(), 400, "messages[3].content", "empty")
    chat["messages"][3] = {"role": "tool", "content": "x"}
    check_error(post(), 400, "messages[3].role", "tool")
    chat["messages"] = chat["messages"][:2]
    check_error(post(), 400, "messages", "action")


def test_a_prompt_over_the_limit_is_refused_with_both_numbers(client, chat):
    check_error(
        client.post("/v1/completions", json={"model": "tiny", "prompt": [9] * 2049}), 400, "prompt", "2049", "2048"
    )
    chat["messages"][0]["content"] = "water " * 3000
    check_error(client.post("/v1/chat/completions", json=chat), 400, "messages", "2048")


def test_old_steps_of_a_long_chat_are_cut_and_counted(client, chat):
    steps = [{"role": "user", "content": "wait"}, {"role": "assistant", "content": "water " * 100}] * 40
    chat["messages"] = [*chat["messages"][:2], *steps, *chat["messages"][2:]]
    reply = client.post("/v1/chat/completions", json=chat).json()
    assert 0 < reply["steps_cut"] < 40
    assert reply["usage"]["prompt_tokens"] <= 2048


@pytest.mark.parametrize("prompt", ["", [], [[]], ["x"] * 65, [10**6], [-1], None, {"a": 1}])
def test_an_impossible_prompt_is_refused(client, prompt):
    response = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


def test_every_other_status_has_the_same_envelope(client):
    check_error(client.get("/v1/models/gpt"), 404, "model", "gpt")
    check_error(client.get("/v1/nothing"), 404, None)
    check_error(client.get("/v1/completions"), 405, None)
    json_type = {"Content-Type": "application/json"}
    check_error(client.post("/v1/completions", content=b"{oops", headers=json_type), 400, None, "JSON")
    check_error(client.post("/v1/completions", content=b"[]", headers=json_type), 400, None)
    check_error(client.post("/v1/completions", content=b"x" * (BODY_LIMIT + 1)), 413, None, str(BODY_LIMIT))
    unannounced = (b"x" * 65536 for _ in range(BODY_LIMIT // 65536 + 1))
    check_error(client.post("/v1/completions", content=unannounced), 413, None, str(BODY_LIMIT))


def test_what_the_model_raises_is_answered_with_500_and_nothing_of_it_leaks(serving, tiny_model, chat, monkeypatch):
    with serving(tiny_model) as client:
        with monkeypatch.context() as patch:
            patch.setattr(type(tiny_model.model), "forward", lambda *_, **__: 1 / 0)
            response = client.post("/v1/chat/completions", json=chat)
            check_error(response, 500, None)
            assert "division" not in response.text
            streamed = events(client, "/v1/chat/completions", chat)
            assert streamed[-1]["error"]["code"] == "internal_error"
        assert client.post("/v1/chat/completions", json=chat).status_code == 200


def test_a_full_queue_is_answered_with_503_and_a_gone_client_frees_its_place(serving, tiny_model):
    body = {"model": "tiny", "prompt": "boil", "max_tokens": 4000}
    with serving(tiny_model, Limits(max_batch=1, max_queue=1)) as client:

        def load() -> tuple[int, int]:
            health = client.get("/health").json()
            return health["running"], health["waiting"]

        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as running:
            lines = running.iter_lines()  # dropping the iterator would close the stream
            next(lines)
            with post_without_reading(client, "/v1/completions", body):
                assert wait_until(lambda: load() == (1, 1))
                refused = client.post("/v1/completions", json=body)
                check_error(refused, 503, None, "waiting")
                assert int(refused.headers["Retry-After"]) > 0
            assert wait_until(lambda: load() == (1, 0)), "a plain request whose client is gone still waits"
        assert wait_until(lambda: load() == (0, 0)), "a stream whose client is gone still runs"
        assert client.post("/v1/completions", json={**body, "max_tokens": 3}).status_code == 200


def post_without_reading(client, path: str, body: dict[str, Any]) -> socket.socket:
    """A client that sends a request and may go away, by closing the socket, before the answer."""
    connection = socket.create_connection((client.base_url.host, client.base_url.port))
    send_post(connection, client, path, body)
    return connection


def send_post(connection: socket.socket, client, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {client.base_url.host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


def test_a_wrong_method_hears_all_the_right_ones(client):
    allowed = {path: client.put(path).headers["Allow"] for path in ("/v1/worlds", "/v1/worlds/x", "/v1/completions")}
    assert allowed == {"/v1/worlds": "GET, POST", "/v1/worlds/x": "DELETE, GET", "/v1/completions": "POST"}
    assert client.post("/").headers["Allow"] == "GET", "a page"


def test_the_description_of_the_api_names_the_model_and_the_envelope_of_every_error(client):
    told = client.get("/openapi.json").json()
    for path, operations in told["paths"].items():
        for operation in operations.values():
            errors = [operation["responses"][status]["content"] for status in ("4XX", "5XX")]
            assert errors == [{"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}] * 2, path
            assert "422" not in operation["responses"]
    schemas = told["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["model"]["enum"] == ["tiny"]
    assert "enum" not in schemas["BatchCreate"]["properties"]["model"], "the answer of the one request refuses it"
    assert client.get("/docs").headers["content-type"].startswith("text/html")


def test_tokens_there_and_back(client, tokenizer, chat):
    text = "<|act|>open the “door”"
    told = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert told["tokens"] == tokenizer(text)["input_ids"]
    assert (told["count"], len(told["token_strs"])) == (len(told["tokens"]),) * 2
    assert client.post("/detokenize", json={"model": "tiny", "tokens": told["tokens"]}).json() == {"prompt": text}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    of_chat = client.post("/tokenize", json={"messages": chat["messages"]}).json()["count"]
    assert of_chat == client.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"]
    check_error(client.post("/detokenize", json={"tokens": [10**6]}), 400, "tokens")
    check_error(client.post("/tokenize", json={}), 400, "prompt")
    assert client.get("/version").json()["version"]


def metrics(client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_metrics_count_requests_tokens_and_loops(serving, tiny_model):
    with serving(tiny_model) as client:
        prompts = ["boil water " * 20, "boil water " * 20, "boil water " * 20 + "and freeze it"]
        used = [completion(client, prompt=prompt, max_tokens=5)["usage"] for prompt in prompts]
        ids = [client.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
        values = metrics(client)
        while values['loopwm:num_requests_running{model_name="tiny"}']:  # a row leaves after its last token is out
            values = metrics(client)
    assert values['loopwm:generation_tokens_total{model_name="tiny"}'] == 15
    assert values['loopwm:prompt_tokens_total{model_name="tiny"}'] == sum(usage["prompt_tokens"] for usage in used)
    assert values['loopwm:request_success_total{finished_reason="length",model_name="tiny"}'] == 3
    assert values['loopwm:loops_per_token_sum{model_name="tiny"}'] == 15 * tiny_model.config.default_depth
    assert values['loopwm:time_to_first_token_seconds_count{model_name="tiny"}'] == 3
    assert values['loopwm:inter_token_latency_seconds_count{model_name="tiny"}'] == 12
    assert values['loopwm:request_queue_time_seconds_count{model_name="tiny"}'] == 3
    read = [one[:-1] for one in ids]  # the last token is decoded
    shared = [*(a == b for a, b in zip(read[0], read[2], strict=False)), False].index(False)
    assert values['loopwm:prefix_cache_queries_total{model_name="tiny"}'] == sum(map(len, read))
    assert values['loopwm:prefix_cache_hits_total{model_name="tiny"}'] == len(read[1]) + shared
    assert values['loopwm:key_tokens_total{key="",model_name="tiny"}'] == 15 + sum(map(len, ids))
    assert values['loopwm:num_worlds{model_name="tiny"}'] == 0
    assert values["process_resident_memory_bytes"] > 1 << 20
