"""Client of the service: its API (`Client`), and remote worlds (`HttpWorlds`). Without torch."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import httpx

from loopwm.records.errors import InputError, naming
from loopwm.records.template import Context
from loopwm.worlds.protocol import Finish, Imagined, WorldError, check_lengths, check_rows, longer

Json = dict[str, Any]

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the service's key."""

TIMEOUT = 600.0
"""Seconds for one answer."""

PATIENCE = 60.0
"""Seconds of retrying a request while the service is full or unreachable."""

MOST_AT_ONCE = 256
"""Requests that the service takes in a batch."""
MOST_BYTES = 1_000_000
"""Bytes of their escaped JSON, under its limit of a body."""

PROXY = (502, 503, 504)
"""Statuses of a proxy, without the service's own error, that cannot reach the service."""

GONE = ("world_not_found", "world_gone")
"""Codes for worlds that the service has deleted."""


class Client:
    """Client of the service's API.

    url: its address, with or without /v1; InputError if invalid. key: its API key, if required. patience: seconds of
    retrying while the service is full.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = TIMEOUT, patience: float = PATIENCE) -> None:
        self._patience = patience
        self.base = url.rstrip("/").removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            raise InputError(f"url: {url!r} does not begin with http:// or https://")
        with naming("url: ", (ValueError, httpx.InvalidURL)):
            here = urlsplit(self.base).hostname in ("127.0.0.1", "localhost", "::1")
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._http = httpx.Client(base_url=f"{self.base}/v1/", headers=headers, timeout=timeout, trust_env=not here)

    def model(self) -> str:
        """Return the served model's name. Raises WorldError."""
        try:
            return str(self.call("GET", "models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise WorldError(f"{self.base} serves no model") from error

    def call(self, method: str, path: str, body: Json | None = None, repeatable: bool = False) -> Json:
        """Send a request with retries. Raises WorldError.

        repeatable: idempotent, so it is also retried without an answer.
        """
        end = time.monotonic() + self._patience
        while True:
            try:
                return self._send(method, path, body)
            except WorldError as error:
                wait = 1.0 if repeatable and error.away else error.retry_after
                if wait is None or time.monotonic() + wait > end:
                    raise
                time.sleep(wait)

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, body: Json | None) -> Json:
        """Return the response's JSON. Raises WorldError."""
        try:
            response = self._http.request(method, path, json=body)
            if not response.is_success:
                raise _refusal(response)
            payload: Json = response.json()
        except httpx.RequestError as error:
            away = isinstance(error, httpx.TransportError)
            raise WorldError(f"{self.base} does not answer: {error}", away=away) from error
        except ValueError as error:
            raise WorldError(f"{self.base} does not answer in JSON") from error
        return payload


def _refusal(response: httpx.Response) -> WorldError:
    status = f"(status {response.status_code})"
    try:
        error = response.json()["error"]
        retry_header = response.headers.get("Retry-After", "")  # of 503, and of 429 where a minute's share is used up
        retry = float(retry_header) if retry_header.isdecimal() else None
        return WorldError(f"{error['message']} {status}", error["code"], retry)
    except (ValueError, LookupError, TypeError):
        return WorldError(f"{response.reason_phrase} {status}", away=response.status_code in PROXY)


@dataclass
class _Row:
    """A world at the client, with everything to recreate it if the service has lost it."""

    context: Context
    actions: tuple[str, ...] = ()
    world: Json = field(default_factory=dict)

    def body(self, model: str) -> Json:
        return {"model": model, **asdict(self.context), "actions": list(self.actions)}


class HttpWorlds:
    """Worlds in a running service, as many in one request as it takes. A world that the service has lost is recreated.

    After a WorldError the rows may be at different steps: begin again.
    """

    def __init__(self, client: Client, model: str, max_new_tokens: int | None = None) -> None:
        """Use `model` of the service. max_new_tokens: of an observation, None for the service's maximum."""
        self._client, self._model = client, model
        self._limit = {} if max_new_tokens is None else {"max_tokens": max_new_tokens}
        self._steps, self._name = 0, uuid.uuid4().hex
        self._rows: list[_Row] = []

    def fresh(self) -> HttpWorlds:
        """Return other worlds of the same model, not begun."""
        return HttpWorlds(self._client, self._model, self._limit.get("max_tokens"))

    @property
    def steps_cut(self) -> tuple[int, ...]:
        return tuple(row.world["steps_cut"] for row in self._rows)

    def begin(self, contexts: Sequence[Context]) -> None:
        check_lengths(len(contexts), Context, contexts=contexts)
        self.close()
        self._rows = [_Row(context) for context in contexts]
        self._make(self._rows)

    def restart(self, rows: Sequence[int], contexts: Sequence[Context]) -> None:
        self._delete([self._rows[row] for row in rows])
        for row, context in zip(rows, contexts, strict=True):
            self._rows[row] = _Row(context)
        self._make([self._rows[row] for row in rows])

    def step(self, actions: Sequence[str], decode: bool = True, rows: Sequence[int] | None = None) -> list[Imagined]:
        if not self._rows:
            raise ValueError("step: begin a world first")
        stepping = self._rows if rows is None else [self._rows[row] for row in rows]
        check_lengths(len(stepping), actions=actions)
        self._steps += 1
        body = {"op": "step", "decode": "last" if decode else "none", **self._limit}
        bodies = [
            {**body, "actions": action, "step_id": f"{self._name}-{self._steps}-{place}"}
            for place, action in enumerate(actions)
        ]
        answers = self._ask(stepping, bodies)
        steps = zip(stepping, actions, answers, strict=True)
        return [self._taken(row, action, answer) for row, action, answer in steps]

    def fork(self, rows: Sequence[int]) -> HttpWorlds:
        check_rows(rows, len(self._rows))
        fork = self.fresh()
        fork._rows = [replace(self._rows[row], world={}) for row in rows]
        try:
            for row in dict.fromkeys(rows):
                copies = [fork._rows[place] for place, other in enumerate(rows) if other == row]
                for start in range(0, len(copies), MOST_AT_ONCE):
                    self._fork(self._rows[row], copies[start : start + MOST_AT_ONCE])
            fork._make([row for row in fork._rows if not row.world])
        except WorldError:
            fork.close()
            raise
        return fork

    def _fork(self, row: _Row, forks: Sequence[_Row]) -> None:
        """Fork a row; rows that the service has lost stay without a world."""
        try:
            copies = self._client.call("POST", f"worlds/{row.world['id']}/fork", {"count": len(forks)})["data"]
        except WorldError as error:
            if error.code not in GONE:
                raise
            return
        for fork, world in zip(forks, copies, strict=True):
            fork.world = world

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        check_lengths(len(self._rows), actions=actions, observations=observations)
        real_steps = zip(self._rows, actions, observations, strict=True)
        after = [_Row(longer(row.context, action, text), (), row.world) for row, action, text in real_steps]
        steps = [row.context.history[-1] for row in after]
        bodies = [{"op": "observe", "action": step.action, "observation": step.observation} for step in steps]
        answers = self._ask(self._rows, bodies)
        self._rows = [replace(row, world=_body(answer)) for row, answer in zip(after, answers, strict=True)]

    def close(self) -> None:
        """Delete these worlds in the service; the client stays open."""
        self._delete(self._rows)
        self._rows = []

    def _taken(self, row: _Row, action: str, answer: Json) -> Imagined:
        """Convert the answer of a step and advance the row."""
        if answer["status"] == 400 and answer["body"]["error"]["code"] == "context_length_exceeded":
            return Imagined("", finish="full")
        body = _body(answer)
        (step,) = body["steps"]
        row.actions, row.world = (*row.actions, action), body["world"]
        text: str = step["observation"] or ""
        finish: Finish = step["finish_reason"] or "stop"
        names = ("trust", "acceptance", "expected_reward")
        return Imagined(text, step["reward"], step["continuation"], finish, *(step[name] for name in names))

    def _make(self, rows: Sequence[_Row]) -> None:
        answers = self._batch([{"op": "create", **row.body(self._model)} for row in rows])
        for row, answer in zip(rows, answers, strict=True):
            row.world = {} if "error" in answer["body"] else answer["body"]
        for answer in answers:
            _body(answer)  # only now, so that `close` deletes those that were made

    def _delete(self, rows: Sequence[_Row]) -> None:
        """Delete worlds; ignore those that are gone."""
        self._batch([{"op": "delete", "world": row.world["id"]} for row in rows if row.world], repeatable=True)

    def _ask(self, rows: Sequence[_Row], bodies: Sequence[Json]) -> list[Json]:
        """Send a request for each row and return the answers; recreate lost worlds and retry once.

        Steps are idempotent by their ids, observations are not.
        """
        repeatable = bool(bodies) and "step_id" in bodies[0]
        answers = self._batch(_named(rows, bodies), repeatable)
        lost = [place for place, answer in enumerate(answers) if answer["body"].get("error", {}).get("code") in GONE]
        if lost:
            self._make([rows[place] for place in lost])
            again = self._batch(_named([rows[i] for i in lost], [bodies[i] for i in lost]), repeatable)
            for place, answer in zip(lost, again, strict=True):
                answers[place] = answer
        return answers

    def _batch(self, requests: Sequence[Json], repeatable: bool = False) -> list[Json]:
        answers: list[Json] = []
        while rest := requests[len(answers) :]:
            sizes = accumulate(len(json.dumps(request)) for request in rest[:MOST_AT_ONCE])
            fitting = max(1, sum(size <= MOST_BYTES for size in sizes))
            body = {"requests": list(rest[:fitting])}
            answers += self._client.call("POST", "/worlds:batch", body, repeatable)["data"]
        return answers


def _named(rows: Sequence[_Row], bodies: Sequence[Json]) -> list[Json]:
    return [{**body, "world": row.world["id"]} for row, body in zip(rows, bodies, strict=True)]


def _body(answer: Json) -> Json:
    """Return the body of an answer in a batch. Raises WorldError."""
    body: Json = answer["body"]
    if "error" in body:
        raise WorldError(f"{body['error']['message']} (status {answer['status']})", body["error"]["code"])
    return body
