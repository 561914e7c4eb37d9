"""Chat completions of an OpenAI-compatible endpoint: retried, cached on disk, counted.

The cache is one SQLite file keyed by the whole request (address and body, never the key), so an answered request is
never sent again by any run, and an interrupted run resumes. An answer cut off at the token limit is not an answer: the
next run requests it again; the cache holds it only for the token count.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_random_exponential,
)

from eval.models.fewshot import Message
from loopwm.records.errors import InputError
from loopwm.records.files import sha256
from loopwm.worlds.http import KEY_VARIABLE

ATTEMPTS = 8
MAX_BACK_OFF = 60.0
"""Seconds. A longer wait that the endpoint asks for is honoured up to MAX_RETRY_AFTER."""

MAX_RETRY_AFTER = 900.0
"""Seconds. If the endpoint asks for more, the run ends, to be resumed later."""

DEFAULT_MAX_TOKENS = 512
THINKING_ENDS = "</think>"
"""End of the reasoning of open models if the server does not separate it; often the chat template opens it."""

_REMEDIES = {"max_tokens": "--max-completion-tokens", "temperature": "--no-temperature"}
"""Options by the parameter that an endpoint refuses. https://platform.openai.com/docs/api-reference/chat/create"""

_RETRIED = frozenset({408, 409, 425, 429})
_backed_off = wait_random_exponential(multiplier=0.5, max=MAX_BACK_OFF)


@dataclass(frozen=True)
class Parameters:
    """Fields of a request besides model and messages.

    max_tokens: of the answer, reasoning included. max_completion_tokens: the same limit by the name that OpenAI's
    current models want, sent instead of max_tokens. greedy: send temperature 0, which reasoning models refuse.
    reasoning_effort: such as low; None: not sent.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    max_completion_tokens: int | None = None
    greedy: bool = True
    reasoning_effort: str | None = None

    @property
    def body(self) -> dict[str, int | str]:
        """Return the fields of a request."""
        newer = self.max_completion_tokens is not None
        sent = {
            "max_tokens": None if newer else self.max_tokens,
            "max_completion_tokens": self.max_completion_tokens,
            "temperature": 0 if self.greedy else None,
            "reasoning_effort": self.reasoning_effort,
        }
        return {name: value for name, value in sent.items() if value is not None}


@dataclass(frozen=True)
class Reply:
    """Answer without reasoning, and the tokens that the endpoint counted (None: not reported).

    cut: it ended at the token limit. A cut answer counts as none; the text is empty.
    """

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cut: bool = False


class UnusableError(Exception):
    """Answer to retry. retry_after: seconds the endpoint asks to wait, or None."""

    def __init__(self, what: str, retry_after: float | None = None) -> None:
        super().__init__(what)
        self.retry_after = retry_after


class ReplyCache:
    """Replies by the hash of their request, in a crash-safe file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, check_same_thread=False, timeout=60, isolation_level=None)
        self._execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, request TEXT, reply TEXT)")
        self._execute("CREATE TABLE IF NOT EXISTS cut (key TEXT, reply TEXT)")

    def get(self, key: str) -> dict[str, Any] | None:
        rows = self._execute("SELECT reply FROM replies WHERE key = ?", key)
        return json.loads(rows[0][0]) if rows else None

    def put(self, key: str, request: str, reply: dict[str, Any]) -> None:
        self._execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", key, request, json.dumps(reply))

    def get_cut(self, key: str) -> list[dict[str, Any]]:
        """Return every reply to this request that was cut."""
        return [json.loads(row[0]) for row in self._execute("SELECT reply FROM cut WHERE key = ?", key)]

    def put_cut(self, key: str, reply: dict[str, Any]) -> None:
        self._execute("INSERT INTO cut VALUES (?, ?)", key, json.dumps(reply))

    def _execute(self, statement: str, *values: str) -> list[Any]:
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise InputError(f"{self._path}: cache of replies: {error}") from error


@dataclass(frozen=True)
class Address:
    """Endpoint address. base: URL before `/chat/completions`, such as http://localhost:8000/v1."""

    base: str
    model: str

    @classmethod
    def parse(cls, text: str, option: str) -> Address:
        """Parse `openai:URL#MODEL`, the value of an option. Raises InputError naming the option."""
        base, _, model = text.removeprefix("openai:").partition("#")
        try:
            url = httpx.URL(base)
        except httpx.InvalidURL as error:
            raise InputError(f"{option}: {text!r}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or not model:
            raise InputError(
                f"{option}: must be openai:URL#MODEL, such as openai:http://localhost:8000/v1#mine, got {text!r}"
            )
        if url.userinfo:
            raise InputError(
                f"{option}: must not contain a key, which would be written to the results; set {KEY_VARIABLE}"
            )
        return cls(base.rstrip("/"), model)


class Endpoint:
    """Client of an endpoint.

    timeout: seconds a request may take in all. The key is read from the variable OPENAI_API_KEY; without it none is
    sent. Every method raises InputError for a refusal, or after ATTEMPTS unusable answers in turn.
    """

    def __init__(
        self,
        address: Address,
        cache: ReplyCache,
        concurrency: int = 8,
        timeout: float = 120,
        parameters: Parameters = Parameters(),
    ) -> None:
        self.address = address
        self.parameters = parameters
        self._cache = cache
        self._concurrency = concurrency
        self._timeout = timeout
        self._stopped = threading.Event()
        key = os.environ.get(KEY_VARIABLE)
        limits = httpx.Limits(max_connections=concurrency)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=timeout, limits=limits)

    def complete(self, messages: Sequence[Message]) -> str:
        """Return the assistant's answer; empty if it was cut."""
        return self.reply(self._request(messages)).text

    def complete_all(self, conversations: Sequence[Sequence[Message]]) -> list[Reply]:
        """Return replies in the order of the conversations; equal ones are requested once, `concurrency` at a time."""
        requests = [self._request(messages) for messages in conversations]
        self._stopped.clear()
        with ThreadPoolExecutor(self._concurrency) as pool:
            futures = {request: pool.submit(self.reply, request) for request in dict.fromkeys(requests)}
            try:
                done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [futures[request].result() for request in requests]

    def paid_all(self, conversations: Iterable[Sequence[Message]]) -> list[Reply]:
        """Return every reply to the conversations, cut ones included; equal conversations once."""
        keys = {sha256(self._request(messages)) for messages in conversations}
        bodies = [body for key in keys for body in (self._cache.get(key), *self._cache.get_cut(key))]
        return [read_reply(body) for body in bodies if body is not None]

    def _request(self, messages: Sequence[Message]) -> str:
        """Return address and body as canonical JSON."""
        body = {"model": self.address.model, "messages": messages, **self.parameters.body}
        return json.dumps({"url": f"{self.address.base}/chat/completions", "body": body}, sort_keys=True)

    def reply(self, request: str) -> Reply:
        """Return the reply to a request, from the cache if present."""
        key = sha256(request)
        cached = self._cache.get(key)
        if cached is not None and not (reply := read_reply(cached)).cut:
            return reply
        body = self._ask_until_usable(json.loads(request))
        reply = read_reply(body)
        if reply.cut:
            self._cache.put_cut(key, body)
        else:
            self._cache.put(key, request, body)
        return reply

    def _ask_until_usable(self, request: dict[str, Any]) -> dict[str, Any]:
        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS) | stop_when_event_set(self._stopped),
            sleep=sleep_using_event(self._stopped),
            wait=_wait,
            retry=retry_if_exception_type(UnusableError),
            reraise=True,
        )
        try:
            return retrying(self._ask, request)
        except UnusableError as error:
            raise InputError(f"{request['url']}: no usable answer in {ATTEMPTS} attempts, the last: {error}") from error

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one attempt. Raises UnusableError, or InputError for errors that a retry would repeat."""
        try:
            response = self._post(request)
        except httpx.RequestError as error:
            raise UnusableError(f"{type(error).__name__} {error}".strip()) from error
        if response.status_code in _RETRIED or response.status_code >= 500:
            pause = retry_after(response.headers.get("Retry-After"))
            if pause is not None and pause > MAX_RETRY_AFTER:
                raise InputError(f"{request['url']}: asks to wait {pause:.0f} s; rerun the command then")
            raise UnusableError(f"status {response.status_code}", pause)
        if response.status_code != 200:
            raise InputError(f"{request['url']}: status {response.status_code}: {_refusal(response)}")
        return _usable_body(response)

    def _post(self, request: dict[str, Any]) -> httpx.Response:
        """Return the whole response. httpx limits each read; the limit here is on all of them together."""
        end = time.monotonic() + self._timeout
        with self._client.stream("POST", request["url"], json=request["body"]) as response:
            content = bytearray()
            for chunk in response.iter_raw():
                content += chunk
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"took more than {self._timeout:g} s")
        return httpx.Response(response.status_code, headers=response.headers, content=bytes(content))


def _wait(state: RetryCallState) -> float:
    """Return seconds to the next attempt: exponential with full jitter, at least what the endpoint asks for."""
    error = state.outcome.exception() if state.outcome is not None else None
    retry_after = error.retry_after if isinstance(error, UnusableError) else None
    return max(_backed_off(state), retry_after or 0.0)


def retry_after(header: str | None) -> float | None:
    """Parse a Retry-After header, seconds or a date, to seconds; None if absent or invalid."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _usable_body(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
        read_reply(body)
    except (ValueError, LookupError, TypeError) as error:
        raise UnusableError(f"not a chat completion: {response.text[:80]!r}") from error
    return body


def _refusal(response: httpx.Response) -> str:
    """Return the message of a refusal in one line, with the option that avoids it if there is one."""
    try:
        error = response.json()["error"]
        said, parameter = str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        said, parameter = response.text, None
    line = " ".join(said.split())[:200]
    return f"{line} (see {_REMEDIES[parameter]})" if parameter in _REMEDIES else line


def read_reply(body: dict[str, Any]) -> Reply:
    """Parse a chat completion. No content is an empty answer. Raises ValueError, LookupError or TypeError."""
    choice = body["choices"][0]
    message = choice["message"]
    cut = choice.get("finish_reason") == "length"
    text = "" if cut else message["content"]
    if not isinstance(text, str | None):
        raise TypeError(f"content is a {type(text).__name__}")
    usage = body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    answer = (text or "").rpartition(THINKING_ENDS)[2]
    return Reply(answer, _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")), cut)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None
