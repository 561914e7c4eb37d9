"""A client of the service: its API (`Client`), and worlds that it keeps (`HttpWorlds`). Without torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from loopwm.records.errors import InputError
from loopwm.records.template import Context
from loopwm.worlds.protocol import Imagined, longer

Json = dict[str, Any]
Row = TypeVar("Row")

TIMEOUT = 600.0
"""Seconds for one answer."""

AT_ONCE = 32
"""Requests that a batch of worlds makes side by side."""


class WorldError(RuntimeError):
    """The service answered with an error, or not at all. code: the service's own, such as context_length_exceeded."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class Client:
    """The service's API. url: its address, with or without /v1. key: its API key, if it asks for one.

    Raises InputError for what is no address.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = TIMEOUT) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            raise InputError(f"--url: {url!r} does not begin with http:// or https://")
        try:
            here = urlsplit(self.base).hostname in ("127.0.0.1", "localhost", "::1")
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._http = httpx.Client(base_url=f"{self.base}/v1/", headers=headers, timeout=timeout, trust_env=not here)
        except (ValueError, httpx.InvalidURL) as error:
            raise InputError(f"--url: {error}") from error

    def model(self) -> str:
        """The served model's name. Raises WorldError."""
        try:
            return str(self.call("GET", "models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise WorldError(f"{self.base} serves no model") from error

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Raises WorldError."""
        with self._ask(method, path, body) as response:
            response.read()
            found: Json = response.json()
        return found

    def events(self, path: str, body: Json) -> Iterator[Json]:
        """POST of a body, and what is told in server-sent events, as it comes. Raises WorldError."""
        with self._ask("POST", path, {**body, "stream": True}) as response:
            for line in response.iter_lines():
                data = line.strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield _told(json.loads(data))
        raise WorldError("the service broke off its answer")

    def close(self) -> None:
        self._http.close()

    @contextmanager
    def _ask(self, method: str, path: str, body: Json | None) -> Iterator[httpx.Response]:
        """The answer, to be read in the block. Raises WorldError, also for what goes wrong in reading it."""
        try:
            with self._http.stream(method, path, json=body) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response)
                yield response
        except httpx.RequestError as error:
            raise WorldError(f"{self.base} does not answer: {error}") from error
        except ValueError as error:
            raise WorldError(f"{self.base} does not answer in JSON") from error


def _refusal(response: httpx.Response) -> WorldError:
    status = f"(status {response.status_code})"
    try:
        error = response.json()["error"]
        return WorldError(f"{error['message']} {status}", error["code"])
    except (ValueError, LookupError, TypeError):
        return WorldError(f"{response.reason_phrase} {status}")


def _told(event: Json) -> Json:
    if "error" in event:
        raise WorldError(event["error"]["message"])
    return event


def world_body(context: Context) -> Json:
    """What a world is made from, as the service reads it."""
    body = asdict(context)
    return {**body, "history": list(body["history"])}


class HttpWorlds:
    """Worlds kept by a running service. After a WorldError the rows may have gone different ways: begin anew."""

    def __init__(
        self, client: Client, model: str, max_new_tokens: int | None = None, pool: ThreadPoolExecutor | None = None
    ) -> None:
        """model: its name there. max_new_tokens: of an observation, None for the service's longest."""
        self._client, self._model = client, model
        self._limit = {} if max_new_tokens is None else {"max_tokens": max_new_tokens}
        self._pool = pool or ThreadPoolExecutor(AT_ONCE)
        self._contexts: list[Context] = []
        self._worlds: list[Json] = []

    @property
    def steps_cut(self) -> tuple[int, ...]:
        return tuple(world["steps_cut"] for world in self._worlds)

    def begin(self, contexts: Sequence[Context]) -> None:
        self.close()
        self._contexts = list(contexts)
        self._worlds = self._each(self._create, contexts)

    def step(self, actions: Sequence[str], decode: bool = True) -> list[Imagined]:
        if not self._worlds:
            raise ValueError("step: begin a world first")
        asked = {"decode": "last" if decode else "none", **self._limit}
        return self._each(lambda row: self._step(row[0], {"actions": row[1], **asked}), self._with(actions))

    def fork(self, rows: Sequence[int]) -> HttpWorlds:
        made = {
            row: iter(self._post(self._worlds[row], "fork", {"count": count})["data"])
            for row, count in Counter(rows).items()
        }
        fork = HttpWorlds(self._client, self._model, self._limit.get("max_tokens"), self._pool)
        fork._contexts = [self._contexts[row] for row in rows]
        fork._worlds = [next(made[row]) for row in rows]
        return fork

    def observe(self, actions: Sequence[str], observations: Sequence[str]) -> None:
        seen = zip(self._contexts, actions, observations, strict=True)
        self._contexts = [longer(*step) for step in seen]
        bodies = [
            {"action": step.history[-1].action, "observation": step.history[-1].observation} for step in self._contexts
        ]
        self._worlds = self._each(
            lambda row: self._observe(*row), list(zip(self._worlds, bodies, self._contexts, strict=True))
        )

    def close(self) -> None:
        """The service forgets these worlds; the client stays."""
        self._each(lambda world: self._client.call("DELETE", f"worlds/{world['id']}"), self._worlds)
        self._worlds = []

    def _create(self, context: Context) -> Json:
        return self._client.call("POST", "worlds", {"model": self._model, **world_body(context)})

    def _step(self, world: Json, body: Json) -> Imagined:
        try:
            (step,) = self._post(world, "step", body)["steps"]
        except WorldError as error:
            if error.code == "context_length_exceeded":
                return Imagined("", finish="full")
            raise
        return Imagined(
            step["observation"] or "", step["reward"], step["continuation"], step["finish_reason"] or "stop"
        )

    def _observe(self, world: Json, body: Json, context: Context) -> Json:
        """Over the context limit the world is made anew, which drops its oldest steps."""
        try:
            return self._post(world, "observe", body)
        except WorldError as error:
            if error.code != "context_length_exceeded":
                raise
        self._client.call("DELETE", f"worlds/{world['id']}")
        return self._create(context)

    def _post(self, world: Json, what: str, body: Json) -> Json:
        return self._client.call("POST", f"worlds/{world['id']}/{what}", body)

    def _with(self, actions: Sequence[str]) -> list[tuple[Json, str]]:
        return list(zip(self._worlds, actions, strict=True))

    def _each(self, ask: Callable[[Row], Any], rows: Sequence[Row]) -> list[Any]:
        return list(self._pool.map(ask, rows))
