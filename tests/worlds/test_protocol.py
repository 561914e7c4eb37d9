"""Worlds in this process and worlds behind a service are the same worlds, and keep the protocol's promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from loopwm.records.errors import InputError
from loopwm.records.template import Context, FormatError, Transition
from loopwm.worlds.http import Client, HttpWorlds
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.protocol import WorldError, Worlds

TOKENS = 12
KITCHEN = Context("boil water", "This is the kitchen.", (Transition("wait", "Nothing happens."),))
HALL = Context("find a tree", "This is the hall.", look="A hall.", inventory="An orange.")

MakeWorlds = Callable[[], Worlds]


@pytest.fixture(scope="module")
def client(worlds_client: httpx.Client) -> Client:
    return Client(str(worlds_client.base_url))


@pytest.fixture
def local(library) -> LocalWorlds:
    return LocalWorlds(library, max_new_tokens=TOKENS)


@pytest.fixture(params=["local", "http"])
def make(request, library, client) -> MakeWorlds:
    if request.param == "local":
        return lambda: LocalWorlds(library, max_new_tokens=TOKENS)
    return lambda: HttpWorlds(client, "tiny", max_new_tokens=TOKENS)


def close_to(steps):
    return [
        (
            step.observation,
            step.finish,
            pytest.approx(step.reward, rel=1e-4),
            pytest.approx(step.continuation, rel=1e-4),
            step.trust and pytest.approx(step.trust, rel=1e-3),
            pytest.approx(step.acceptance, rel=1e-4),
            pytest.approx(step.expected_reward, rel=1e-4, abs=1e-4),
        )
        for step in steps
    ]


def told(steps):
    names = ("observation", "finish", "reward", "continuation", "trust", "acceptance", "expected_reward")
    return [tuple(getattr(step, name) for name in names) for step in steps]


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


def test_a_fork_goes_its_own_way(make):
    worlds = make()
    worlds.begin([KITCHEN, HALL])
    fork = worlds.fork([1, 0, 1])
    apart = fork.step(["wait", "wait", "look around"])
    fresh = make()
    fresh.begin([HALL, KITCHEN])
    together = fresh.step(["wait", "wait"])
    assert told(apart[:2]) == close_to(together)
    assert told(worlds.step(["wait", "wait"])) == close_to(together[::-1])


def test_what_was_observed_takes_the_place_of_what_was_imagined(make):
    worlds, fresh = make(), make()
    worlds.begin([HALL, KITCHEN])
    worlds.step(["look around", "wait"])
    worlds.observe(["open door", "wait"], ["It is open.", "Nothing."])
    fresh.begin([
        replace(HALL, history=(Transition("open door", "It is open."),)),
        replace(KITCHEN, history=(*KITCHEN.history, Transition("wait", "Nothing."))),
    ])  # fmt: skip
    assert told(worlds.step(["wait", "wait"])) == close_to(fresh.step(["wait", "wait"]))


def test_an_observation_over_the_limit_drops_the_oldest_steps(make, library, monkeypatch):
    monkeypatch.setattr(library.model.config, "context_tokens", 60)
    worlds = make()
    worlds.begin([HALL])
    for _ in range(6):
        worlds.observe(["go to the other room"], ["This is the hall again."])
    assert worlds.steps_cut[0] > 0
    assert worlds.step(["wait"])[0].finish == "length"


def test_a_text_that_is_cut_and_a_world_that_is_full_are_told(make):
    worlds, long = make(), "carry it on " * 150
    worlds.begin([HALL])
    steps = [worlds.step([long])[0] for _ in range(12)]
    finishes = [step.finish for step in steps]
    full = finishes.index("full")
    assert set(finishes[:full]) <= {"stop", "length"}
    assert all(finish == "full" for finish in finishes[full:])
    assert steps[full].observation == ""


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


def test_a_fork_observes_from_the_last_real_step(make):
    worlds, fresh = make(), make()
    worlds.begin([HALL])
    worlds.step(["look around"])
    fork = worlds.fork([0])
    fork.observe(["open door"], ["It is open."])
    fresh.begin([replace(HALL, history=(Transition("open door", "It is open."),))])
    assert told(fork.step(["wait"])) == close_to(fresh.step(["wait"]))


def test_worlds_beyond_one_batch_are_stepped_in_order(client, local, monkeypatch):
    monkeypatch.setattr("loopwm.worlds.http.MOST_AT_ONCE", 2)
    remote = HttpWorlds(client, "tiny", max_new_tokens=TOKENS)
    actions = ["wait", "look around", "open door", "go to hall", "wait"]
    for worlds in (local, remote):
        worlds.begin([KITCHEN, HALL, KITCHEN, HALL, HALL])
    assert told(remote.step(actions)) == close_to(local.step(actions))


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


def test_lists_of_another_length_and_rows_that_are_not_there_are_named(make):
    worlds = make()
    worlds.begin([KITCHEN, HALL])
    with pytest.raises(FormatError, match="rows: must be 0 to 1, got 2"):
        worlds.fork([0, 2])
    with pytest.raises(FormatError, match="actions: must be 2, one a world, got 1"):
        worlds.observe(["wait"], ["Nothing happens.", "Nothing happens."])
    with pytest.raises(FormatError, match="observations: must be 2, one a world, got 0"):
        worlds.observe(["wait", "wait"], [])
    with pytest.raises(FormatError, match="actions: must be 2, one a world, got 1"):
        worlds.step(["wait"])
    worlds.close()


def test_worlds_text_in_place_of_a_list_is_named(make):
    worlds = make()
    worlds.begin([KITCHEN])
    with pytest.raises(FormatError, match="actions: must be a list of str, one a world, got 'wait'"):
        worlds.step("wait")
    with pytest.raises(FormatError, match=r"contexts: must be a list of Context, one a world, got \['text'\]"):
        worlds.begin(["text"])
    worlds.close()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://here", "http://[::1"])
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(InputError, match="url: "):
        Client(url)


def test_a_service_that_is_not_there_is_told():
    with pytest.raises(WorldError, match=r"http://127\.0\.0\.1:1 does not answer"):
        Client("http://127.0.0.1:1/v1").model()
