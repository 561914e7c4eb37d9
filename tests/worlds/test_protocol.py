"""Worlds in this process and worlds behind a service are the same worlds, and keep the protocol's promises."""

from __future__ import annotations

import json
from copy import copy, deepcopy
from dataclasses import asdict

import httpx
import pytest

from loopwm.records.errors import InputError
from loopwm.records.template import Context
from loopwm.text.world import WorldModel
from loopwm.worlds.http import Client, HttpWorlds
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.protocol import WorldError
from tests.worlds.contract import (  # noqa: F401
    HALL,
    KITCHEN,
    TOKENS,
    MakeWorlds,
    close_to,
    test_a_fork_goes_its_own_way,
    test_a_fork_observes_from_the_last_real_step,
    test_a_text_that_is_cut_and_a_world_that_is_full_are_told,
    test_an_observation_over_the_limit_drops_the_oldest_steps,
    test_lists_of_another_length_and_rows_that_are_not_there_are_named,
    test_what_was_observed_takes_the_place_of_what_was_imagined,
    test_worlds_text_in_place_of_a_list_is_named,
    told,
)


@pytest.fixture(scope="module", params=["own engine", "vllm"])
def engine(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def client(engine, request) -> Client:
    """A service over its own engine, or over the stand-in of vLLM's server."""
    service = request.getfixturevalue("worlds_client" if engine == "own engine" else "vllm_client")
    return Client(str(service.base_url))


@pytest.fixture
def local(engine, library) -> LocalWorlds:
    """Worlds in this process; a server of tokens has no heads, so its service predicts no rewards."""
    if engine == "vllm":
        model = copy(library.model)
        model.config = deepcopy(model.config)
        model.config.prediction_heads = False
        library = WorldModel(model, library.tokenizer)
    return LocalWorlds(library, max_new_tokens=TOKENS)


@pytest.fixture(params=["local", "http"])
def make(request, engine, local, client) -> MakeWorlds:
    if request.param == "http":
        return lambda: HttpWorlds(client, "tiny", max_new_tokens=TOKENS)
    if engine == "vllm":
        pytest.skip("worlds in this process have no other engine")
    return local.fresh


def test_a_service_imagines_what_this_process_does(local, client):
    remote = HttpWorlds(client, "tiny", max_new_tokens=TOKENS)
    for worlds in (local, remote):
        worlds.begin([KITCHEN, HALL])
    for decode in (False, True):
        assert told(remote.step(["wait", "look around"], decode)) == close_to(
            local.step(["wait", "look around"], decode)
        )
    assert remote.steps_cut == local.steps_cut == (0, 0)
    remote.close()


def test_closed_worlds_are_gone_from_the_service(client):
    worlds = HttpWorlds(client, "tiny")
    worlds.begin([HALL, KITCHEN])
    held = len(client.call("GET", "worlds")["data"])
    worlds.close()
    assert len(client.call("GET", "worlds")["data"]) == held - 2
    with pytest.raises(ValueError, match="begin a world first"):
        worlds.step(["wait", "wait"])


def test_worlds_that_the_service_has_lost_are_made_again_without_notice(client, local):
    remote = HttpWorlds(client, "tiny", max_new_tokens=TOKENS)
    for worlds in (local, remote):
        worlds.begin([KITCHEN, HALL])
        worlds.step(["wait", "look around"])
        if worlds is remote:
            client.call("DELETE", f"worlds/{remote._rows[1].world['id']}")
    assert told(remote.step(["wait", "wait"])) == close_to(local.step(["wait", "wait"]))
    client.call("DELETE", f"worlds/{remote._rows[0].world['id']}")
    assert told(remote.fork([1, 0]).step(["wait", "wait"])) == close_to(local.fork([1, 0]).step(["wait", "wait"]))


def test_lost_worlds_are_remade_from_what_was_observed(client, local):
    remote = HttpWorlds(client, "tiny", max_new_tokens=TOKENS)
    for worlds in (local, remote):
        worlds.begin([HALL])
        worlds.step(["look around"])
        worlds.observe(["open door"], ["It is open."])
    client.call("DELETE", f"worlds/{remote._rows[0].world['id']}")
    assert told(remote.step(["wait"])) == close_to(local.step(["wait"]))


def test_worlds_beyond_one_batch_are_stepped_in_order(client, local, monkeypatch):
    monkeypatch.setattr("loopwm.worlds.http.MOST_AT_ONCE", 2)
    remote = HttpWorlds(client, "tiny", max_new_tokens=TOKENS)
    actions = ["wait", "look around", "open door", "go to hall", "wait"]
    for worlds in (local, remote):
        worlds.begin([KITCHEN, HALL, KITCHEN, HALL, HALL])
    assert told(remote.step(actions)) == close_to(local.step(actions))


def test_requests_of_many_bytes_and_of_many_forks_go_in_several(client, local, monkeypatch):
    request = {"op": "create", "model": "tiny", **asdict(HALL), "actions": []}
    monkeypatch.setattr("loopwm.worlds.http.MOST_BYTES", 2 * len(json.dumps(request)))
    monkeypatch.setattr("loopwm.worlds.http.MOST_AT_ONCE", 3)
    sent, call = [], client.call

    def recorded(method, path, body=None, repeatable=False):
        sent.append((path.rpartition("/")[2], len((body or {}).get("requests", ())) or (body or {}).get("count")))
        return call(method, path, body, repeatable)

    monkeypatch.setattr(client, "call", recorded)
    remote = HttpWorlds(client, "tiny", max_new_tokens=TOKENS)
    for worlds in (local, remote):
        worlds.begin([HALL] * 5)
    assert sent == [("worlds:batch", 2), ("worlds:batch", 2), ("worlds:batch", 1)]
    sent.clear()
    forks = remote.fork([1] * 4)
    assert sent == [("fork", 3), ("fork", 1)]
    assert told(forks.step(["wait"] * 4)) == close_to([local.step(["wait"] * 5)[0]] * 4)


def test_one_row_begins_anew_and_the_others_go_on(client, local):
    remote = HttpWorlds(client, "tiny", max_new_tokens=TOKENS)
    remote.begin([KITCHEN, HALL])
    remote.step(["wait", "look around"])
    remote.restart([0], [HALL])
    local.begin([HALL])
    expected = [local.step([action])[0] for action in ("look around", "wait")]
    local.begin([HALL])
    first = local.step(["wait"])[0]
    assert told(remote.step(["wait", "wait"])) == close_to([first, expected[1]])


@pytest.mark.parametrize("status", [503, 429])
def test_a_client_waits_as_long_as_it_is_told_and_asks_again(monkeypatch, status):
    asked, slept = [], []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) < 3:
            error = {"message": "full", "type": "server_error", "param": None, "code": "overloaded"}
            return httpx.Response(status, json={"error": error}, headers={"Retry-After": "7"})
        return httpx.Response(200, json={"data": []})

    monkeypatch.setattr("loopwm.worlds.http.time.sleep", slept.append)
    client = Client("http://127.0.0.1:1")
    client._http = httpx.Client(base_url=client.base, transport=httpx.MockTransport(answer))
    assert client.call("POST", "/v1/worlds", {}) == {"data": []}
    assert slept == [7.0, 7.0]
    impatient = Client("http://127.0.0.1:1", patience=5)
    impatient._http, asked[:] = client._http, []
    with pytest.raises(WorldError, match="full"):
        impatient.call("POST", "/v1/worlds", {})


def test_a_proxy_that_finds_no_service_is_asked_again_where_that_does_no_harm(monkeypatch):
    asked, slept = [], []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={}) if len(asked) == 3 else httpx.Response(502, html="<h1>Bad gateway</h1>")

    monkeypatch.setattr("loopwm.worlds.http.time.sleep", slept.append)
    client = Client("http://127.0.0.1:1")
    client._http = httpx.Client(base_url=client.base, transport=httpx.MockTransport(answer))
    with pytest.raises(WorldError, match="502"):
        client.call("POST", "/v1/worlds", {})
    asked.clear()
    assert client.call("POST", "/v1/worlds", {}, repeatable=True) == {}
    assert slept == [1.0, 1.0]


def test_worlds_that_were_made_beside_one_that_failed_are_not_lost(client):
    held = len(client.call("GET", "worlds")["data"])
    worlds, wrong = HttpWorlds(client, "tiny"), Context("boil water " * 3000, "")
    for contexts in ([wrong, HALL], [HALL, wrong, KITCHEN]):
        with pytest.raises(WorldError, match="400"):
            worlds.begin(contexts)
    worlds.close()
    assert len(client.call("GET", "worlds")["data"]) == held


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://here", "http://[::1"])
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(InputError, match="url: "):
        Client(url)


def test_a_service_that_is_not_there_is_told():
    with pytest.raises(WorldError, match=r"http://127\.0\.0\.1:1 does not answer"):
        Client("http://127.0.0.1:1/v1").model()
