"""What every request passes first and last: its Host, its time, its line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serve.http import server
from serve.http.auth import KeyRing
from serve.http.logs import JsonFormatter, PlainFormatter, access
from tests.fixtures import service
from tests.fixtures.service import wait_until
from tests.serve.http.test_http import check_error, post_without_reading, send_post
from tests.serve.worlds.test_worlds import create

SECRET = "alice-has-this-key"
SHORT = 0.3
"""Seconds in the place of half a minute."""


class Lines(logging.Handler):
    """Collects the log's lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def about(self, request_id: str) -> str:
        """The one line of a request. It is written when the last byte of the answer is on its way."""
        (line,) = self.all_about(request_id, 1)
        return line

    def all_about(self, request_id: str, count: int) -> list[str]:
        """The lines of a request, `count` at least. Those of earlier ones may come as late as these."""
        assert wait_until(lambda: sum(request_id in line for line in self.lines) >= count)
        return [line for line in self.lines if request_id in line]


@pytest.fixture
def log() -> Iterator[Lines]:
    lines, root, before = Lines(), logging.getLogger(), access.level
    lines.setFormatter(PlainFormatter())
    root.addHandler(lines)
    access.setLevel(logging.INFO)
    yield lines
    root.removeHandler(lines)
    access.setLevel(before)


@pytest.fixture
def json_log(log) -> Lines:
    log.setFormatter(JsonFormatter())
    return log


PREFIX, SITE = "/imagine", "https://app.example"


@pytest.fixture(scope="module")
def named(serving, tiny_model) -> Iterator[httpx.Client]:
    """A service with a name, under a path, for pages of another site and with a key, SECRET."""
    keys = KeyRing({"alice": hashlib.sha256(SECRET.encode()).hexdigest()})
    with serving(tiny_model, hosts=("World.example",), keys=keys, origins=[SITE], root_path=PREFIX) as client:
        yield client


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has ended it, sooner than in its half a minute."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_a_foreign_host_learns_nothing(client, host):
    check_error(client.get("/v1/worlds", headers={"Host": host}), 421, None, "--allowed-hosts")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:80", "192.168.7.7:8000", "[::1]:8000"])
def test_addresses_and_the_machine_itself_are_hosts(client, host):
    assert client.get("/v1/worlds", headers={"Host": host}).status_code == 200


def test_a_service_answers_for_the_names_it_was_given(named, client):
    host = {"Host": "world.example:443"}
    assert (named.get("/health", headers=host).status_code, client.get("/health", headers=host).status_code) == (
        200,
        421,
    )


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/", "/nothing"])
def test_head_is_get_without_its_body(client, path):
    head, whole = client.head(path), client.get(path)
    assert head.status_code == whole.status_code
    assert (head.content, head.headers["Content-Length"]) == (b"", whole.headers["Content-Length"])
    assert client.get("/health").json()["status"] == "ok"  # nothing of that body came late, into this answer


def test_a_fault_is_logged_and_counted_as_what_was_answered(client, log, monkeypatch):
    def fault(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("serve.http.openai._model_object", fault)
    answer = client.get("/v1/models", headers={"X-Request-Id": "faulty-1"})
    check_error(answer, 500, None)
    assert answer.headers["X-Request-Id"] == "faulty-1"
    line, fault = log.all_about("faulty-1", 2)
    assert " 500 " in line
    assert fault.startswith("error: request faulty-1: ")
    assert fault.endswith("RuntimeError: broken")


def test_the_traceback_of_a_fault_is_one_object_of_the_log_in_json(client, json_log, monkeypatch):
    monkeypatch.setattr("serve.http.openai._model_object", None)
    client.get("/v1/models", headers={"X-Request-Id": "faulty-2"})
    line, fault = map(json.loads, json_log.all_about("faulty-2", 2))
    assert {line["request_id"], fault["request_id"]} == {"faulty-2"}
    assert (fault["level"], fault["exception"].splitlines()[-1]) == (
        "error",
        "TypeError: 'NoneType' object is not callable",
    )


def test_a_page_of_a_named_site_may_use_the_service_and_no_other(named, client):
    asked = {"Origin": SITE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = named.options("/v1/worlds", headers=asked)  # browsers send no key with it
    assert (preflight.status_code, preflight.headers["Access-Control-Allow-Origin"]) == (200, SITE)
    assert "authorization" in preflight.headers["Access-Control-Allow-Headers"]
    refused = named.post("/v1/worlds", headers={"Origin": SITE})  # a page may read that its key is wrong
    assert (refused.status_code, refused.headers["Access-Control-Allow-Origin"]) == (401, SITE)
    evil = named.get("/health", headers={"Origin": "https://evil.example"})
    for other in (evil, client.get("/health", headers=asked)):
        assert "Access-Control-Allow-Origin" not in other.headers


@pytest.mark.parametrize("prefix", ["", PREFIX], ids=["removed", "left"])
def test_behind_a_path_the_service_answers_whether_its_proxy_removes_it_or_not(named, prefix):
    assert named.get(f"{prefix}/health").status_code == 200
    assert named.get(f"{prefix}/v1/models").status_code == 401
    headers = {"Authorization": f"Bearer {SECRET}"}
    assert named.get(f"{prefix}/v1/models", headers=headers).status_code == 200
    assert named.put(f"{prefix}/v1/models", headers=headers).headers["Allow"] == "GET"
    assert named.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": PREFIX}]


def test_a_connection_that_says_nothing_is_closed(client, monkeypatch):
    monkeypatch.setattr(server, "READ_SECONDS", SHORT)
    with connect(client) as silent:
        assert is_closed(silent)


@pytest.mark.parametrize(
    "said", [b"GET /health HT", b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_request_that_does_not_come_to_its_end_is_closed(client, monkeypatch, said):
    monkeypatch.setattr(server, "READ_SECONDS", SHORT)
    with connect(client) as slow:
        slow.sendall(said)
        assert is_closed(slow)


def received(connection: socket.socket) -> bytes:
    """All that the other side sends until it ends the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
LARGE_HEADS = {
    "lines": HEAD + b"X: y\r\n" * 101 + b"\r\n",
    "bytes": HEAD + b"X: %s\r\n\r\n" % (b"y" * (40 << 10)),
    "endless": HEAD + b"X: " + b"y" * (40 << 10),
    "url": b"GET /%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % (b"y" * (40 << 10)),
    "trailers": b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    + b"X: y\r\n" * 101,
}


@pytest.mark.parametrize("head", LARGE_HEADS.values(), ids=LARGE_HEADS.keys())
def test_server_large_head_is_refused_with_431(client, head):
    with connect(client) as connection:
        connection.sendall(head)
        assert received(connection).startswith(b"HTTP/1.1 431 ")


def test_server_head_within_limits_is_answered(client):
    headers = {f"X-{i}": "y" * 300 for i in range(90)}
    for _ in range(3):  # on one connection: each head counts for itself
        assert client.get("/health", headers=headers).status_code == 200


class Swapped(asyncio.Protocol):
    """Takes a connection over, as a WebSocket library does."""

    def __init__(self, **_: Any) -> None:
        pass

    def connection_made(self, transport: Any) -> None:
        transport.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")


def test_server_websocket_upgrade_keeps_no_place(serving, tiny_model, monkeypatch):
    monkeypatch.setattr("uvicorn.protocols.websockets.auto.AutoWebSocketsProtocol", Swapped)
    before = server.Connection.count
    with serving(tiny_model) as client:
        _upgrade_and_leave(client)
        assert wait_until(lambda: server.Connection.count <= before)


def _upgrade_and_leave(client: httpx.Client) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    for _ in range(8):
        with connect(client) as connection:
            connection.sendall(HEAD + upgrade + b"\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_an_answer_may_take_longer_than_a_request(client, monkeypatch):
    body = {"model": "tiny", "prompt": "boil", "max_tokens": 400}
    with connect(client) as connection:
        connection.settimeout(None)
        connection.sendall(HEAD + b"\r\n")
        answer = connection.recv(1 << 16)  # it is connected, and has half a minute: a busy machine could miss 0.05 s
        monkeypatch.setattr(server, "READ_SECONDS", 0.05)
        begun = time.monotonic()
        send_post(connection, client, "/v1/completions", body)
        while b'"completion_tokens":400' not in answer:
            part = connection.recv(1 << 16)
            assert part, "closed before its answer"
            answer += part
    assert time.monotonic() - begun > 2 * server.READ_SECONDS


def test_of_too_many_connections_the_longest_silent_one_gives_way(client, monkeypatch):
    monkeypatch.setattr(server, "_most_connections", lambda: 3)
    monkeypatch.setattr(server.Connection, "idle", {})  # those that other tests left open would go first
    silent = [connect(client) for _ in range(6)]
    try:
        assert httpx.get(f"{client.base_url}/health", timeout=20, trust_env=False).status_code == 200
        assert all(is_closed(connection) for connection in silent[:3])
    finally:
        for connection in silent:
            connection.close()


@pytest.fixture
def deaf(serving, tiny_model, monkeypatch) -> Iterator[httpx.Client]:
    """A service whose system takes little in of what nobody reads, and that soon stops waiting."""
    listen = service.listen

    def narrow(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(service, "listen", narrow)
    monkeypatch.setattr(server, "WRITE_SECONDS", SHORT)
    with serving(tiny_model) as client:
        yield client


def ask_and_not_read(client: httpx.Client, path: str, body: dict[str, Any]) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it is told how much there is room for
    connection.connect((client.base_url.host, client.base_url.port))
    send_post(connection, client, path, body)
    return connection


def has_cancelled(client: httpx.Client, count: int) -> bool:
    outcome = f'loopwm:request_outcome_total{{model_name="tiny",outcome="cancelled"}} {count}.0'
    return outcome in client.get("/metrics").text


def test_a_client_that_stops_reading_gives_its_row_back(deaf):
    body = {"model": "tiny", "prompt": "boil", "max_tokens": 3500, "stream": True, "logprobs": 20}
    with ask_and_not_read(deaf, "/v1/completions", body):
        assert wait_until(lambda: has_cancelled(deaf, 1))
        assert wait_until(lambda: deaf.get("/health").json()["running"] == 0)


def test_a_client_that_stops_reading_a_step_gives_its_world_back(deaf, monkeypatch):
    monkeypatch.setattr(server, "WRITE_SECONDS", 600)  # until the step was seen to run
    world = f"/v1/worlds/{create(deaf)}"
    before = deaf.get(world).json()
    options = {"logprobs": True, "stream": True, "temperature": 1.0}  # samples: greedy texts may be held to their end
    many = {"actions": ["wait"] * 32, "decode": "each", "max_tokens": 3000, **options}
    with ask_and_not_read(deaf, f"{world}/step", many) as connection:
        assert wait_until(lambda: deaf.get("/health").json()["running"] == 32)
        busy = deaf.post(f"{world}/step", json={"actions": "look"})
        check_error(busy, 409, None)
        assert busy.headers["Retry-After"] == "1"
        monkeypatch.setattr(server, "WRITE_SECONDS", SHORT)
        for _ in range(64):  # more than the server's buffers hold: it writes on, and waits again
            assert connection.recv(4096)
        assert wait_until(lambda: has_cancelled(deaf, 32))
        assert deaf.get(world).json() == before
        assert deaf.post(f"{world}/step", json={"actions": "look", "decode": "none"}).status_code == 200


def test_a_slow_reader_is_served_as_long_as_it_reads():
    waiting, timers, aborted = [10 * server.WRITE_BYTES], [], []
    transport = SimpleNamespace(get_write_buffer_size=lambda: waiting[-1], abort=lambda: aborted.append(waiting[-1]))
    loop = SimpleNamespace(call_later=lambda seconds, watch, most: timers.append((seconds, partial(watch, most))))
    connection = SimpleNamespace(transport=transport, loop=loop)
    connection._watch_writing = partial(server.Connection._watch_writing, connection)
    connection._watch_writing()
    for size in (8, 7, 6.5):  # in the third time it reads half as much as it must
        waiting.append(size * server.WRITE_BYTES)
        seconds, look_again = timers.pop()
        assert (seconds, aborted) == (server.WRITE_SECONDS, [])
        look_again()
    assert (aborted, timers) == ([6.5 * server.WRITE_BYTES], [])


def test_an_answer_has_the_clients_request_id_or_a_new_one(client):
    given = client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"]
    ids = {client.get("/health", headers=h).headers["X-Request-Id"] for h in ({}, {}, {"X-Request-Id": "a b"})}
    assert (given, len(ids), "a b" in ids) == ("mine-1", 3, False)


def test_a_line_of_the_log_is_who_what_how_it_ended_and_the_request_id(client, log):
    client.post("/v1/worlds/none/step", json={"actions": "x"}, headers={"X-Request-Id": "plain-1"})
    address, key, method, path, status, size, milliseconds, request_id = log.about("plain-1").split(" ")
    assert (address, key, method, path, status) == ("127.0.0.1", "-", "POST", "/v1/worlds/none/step", "404")
    assert int(size) > 50
    assert float(milliseconds) > 0
    assert request_id == "plain-1"


def test_log_has_the_forwarded_address_of_trusted_proxies_only(serving, tiny_model, client, log):
    client.get("/health", headers={"X-Request-Id": "forged-1", "X-Forwarded-For": "9.9.9.9"})
    assert log.about("forged-1").startswith("127.0.0.1 ")
    with serving(tiny_model, proxies=["127.0.0.0/8"]) as behind:
        behind.get("/health", headers={"X-Request-Id": "proxied-1", "X-Forwarded-For": "9.9.9.9"})
        assert log.about("proxied-1").startswith("9.9.9.9 ")


def test_no_path_writes_a_line_of_its_own(client, log):
    client.get("/a%0Ab%20c%1b[31m", headers={"X-Request-Id": "plain-2"})
    assert log.about("plain-2").split(" ")[3] == "/a?b?c?[31m"


def test_the_log_in_json_says_the_same_and_when(client, json_log):
    client.get("/a%0Ab", headers={"X-Request-Id": "json-1"})
    told: dict[str, Any] = json.loads(json_log.about("json-1"))
    assert {"time", "client", "key", "method", "path", "status", "bytes", "ms", "request_id"} == told.keys()
    assert (told["method"], told["path"], told["status"], told["key"]) == ("GET", "/a\nb", 404, None)


def test_who_leaves_early_stands_in_the_log(client, log):
    body = {"model": "tiny", "prompt": "left early", "max_tokens": 1500}
    with post_without_reading(client, "/v1/completions", body):
        assert wait_until(lambda: client.get("/health").json()["running"] == 1)
    assert " 499 " in log.about("/v1/completions")


def test_metrics_count_every_answer_by_route_and_status(client):
    client.get("/v1/worlds/none")
    counted = 'loopwm:http_requests_total{method="GET",model_name="tiny",route="/v1/worlds/{name}",status="404"}'
    assert counted in client.get("/metrics").text
