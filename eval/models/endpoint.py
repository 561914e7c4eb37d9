"""Chat completions of an OpenAI-compatible endpoint: cached on disk, counted. The client of `openai` retries.

The cache is one SQLite file keyed by the whole request (address and body, never the key), so an answered request is
never sent again by any run, and an interrupted run resumes. An answer cut off at the token limit is not an answer: the
next run requests it again; the cache holds it only for the token count.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

from eval.models.fewshot import Message, Shots
from eval.scores.predictions import Prediction
from loopwm.records.errors import InputError, naming
from loopwm.records.files import sha256
from loopwm.records.template import ContextKind, window_context
from loopwm.records.windows import Window
from loopwm.worlds.http import KEY_VARIABLE

ATTEMPTS = 8
DEFAULT_MAX_TOKENS = 512
THINKING_ENDS = "</think>"
"""End of the reasoning of open models if the server does not separate it; often the chat template opens it."""

_REMEDIES = {"max_tokens": "--max-completion-tokens", "temperature": "--no-temperature"}
"""Options by the parameter that an endpoint refuses. https://platform.openai.com/docs/api-reference/chat/create"""


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


class ReplyCache:
    """Replies by the hash of their request, in a crash-safe file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()
        # No transactions: a reply is stored at once. Other runs may write to the file, hence the timeout.
        with naming(f"{path}: cache of replies: ", sqlite3.Error):
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
        with naming(f"{self._path}: cache of replies: ", sqlite3.Error), self._lock:
            return self._connection.execute(statement, values).fetchall()


@dataclass(frozen=True)
class Address:
    """Endpoint address. base: URL before `/chat/completions`, such as http://localhost:8000/v1."""

    base: str
    model: str

    @classmethod
    def parse(cls, text: str, option: str) -> Address:
        """Parse `openai:URL#MODEL`, the value of an option. Raises InputError naming the option."""
        base, _, model = text.removeprefix("openai:").partition("#")
        with naming(f"{option}: {text!r}: ", ValueError):
            url = urlsplit(base)
        if url.scheme not in ("http", "https") or not url.hostname or not model:
            raise InputError(
                f"{option}: must be openai:URL#MODEL, such as openai:http://localhost:8000/v1#mine, got {text!r}"
            )
        if url.username is not None:
            raise InputError(f"{option}: must not contain a key, which results would show; set {KEY_VARIABLE}")
        return cls(base.rstrip("/"), model)


class Endpoint:
    """Client of an endpoint.

    timeout: seconds to wait for an answer. The key is read from the variable OPENAI_API_KEY. Every method raises
    InputError for a refusal, or after ATTEMPTS failures in turn.
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
        self._client = openai.OpenAI(
            base_url=address.base,
            api_key=os.environ.get(KEY_VARIABLE) or "none",  # the client does not start without one
            timeout=timeout,
            max_retries=ATTEMPTS - 1,
        )

    def complete(self, messages: Sequence[Message]) -> str:
        """Return the assistant's answer; empty if it was cut."""
        return self.reply(self._request(messages)).text

    def complete_all(self, conversations: Sequence[Sequence[Message]]) -> list[Reply]:
        """Return replies in the order of the conversations; equal ones are requested once, `concurrency` at a time."""
        requests = [self._request(messages) for messages in conversations]
        pool = ThreadPoolExecutor(self._concurrency)
        futures = {pool.submit(self.reply, request): request for request in dict.fromkeys(requests)}
        try:
            replies = {futures[future]: future.result() for future in as_completed(futures)}
        except BaseException:
            self._client.close()  # ends the retries that are under way
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        return [replies[request] for request in requests]

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
        body = self._ask(json.loads(request))
        reply = read_reply(body)
        if reply.cut:
            self._cache.put_cut(key, body)
        else:
            self._cache.put(key, request, body)
        return reply

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request until its answer is a chat completion. The client retries passing failures by itself."""
        create = self._client.chat.completions.with_raw_response.create
        for _ in range(ATTEMPTS):
            try:
                text = create(**request["body"]).text
            except openai.APIStatusError as error:
                raise InputError(f"{request['url']}: status {error.status_code}: {_refusal(error)}") from error
            except openai.APIConnectionError as error:
                raise InputError(f"{request['url']}: no answer in {ATTEMPTS} attempts: {error}") from error
            try:
                body: dict[str, Any] = json.loads(text)
                read_reply(body)  # raises for anything but a completion
            except (ValueError, LookupError, TypeError):
                continue
            return body
        raise InputError(f"{request['url']}: not a chat completion: {text[:80]!r}")


def _refusal(error: openai.APIStatusError) -> str:
    """Return the message of a refusal in one line, with the option that avoids it if there is one."""
    body: Any = error.body
    message = str(body["message"]) if isinstance(body, dict) and "message" in body else error.response.text
    line, parameter = " ".join(message.split())[:200], body.get("param") if isinstance(body, dict) else None
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
    answer = (text or "").rpartition(THINKING_ENDS)[2]  # the whole text without one
    read, written = counts.get("prompt_tokens"), counts.get("completion_tokens")
    return Reply(answer, read if isinstance(read, int) else None, written if isinstance(written, int) else None, cut)


@dataclass(frozen=True)
class EndpointPredictor:
    """Predict with a language model behind an endpoint: one few-shot request for each window and horizon."""

    endpoint: Endpoint
    shots: Shots

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {**self.shots.identity, **self.endpoint.parameters.body}

    def predict(
        self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]
    ) -> list[Prediction]:
        conversations = [messages for window in windows for messages in self._ask(window, context_kind, horizons)]
        replies = iter(self.endpoint.complete_all(conversations))
        predictions = []
        for _ in windows:
            answers = {k: next(replies) for k in horizons}
            unanswered = frozenset(k for k, reply in answers.items() if reply.cut)
            texts = {k: reply.text for k, reply in answers.items()}
            predictions.append(Prediction(texts, unanswered=unanswered))
        return predictions

    def usage(self, windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]) -> dict[str, int]:
        """Count requests and tokens of a whole run; equal requests once, cut replies each.

        Tokens are over the replies whose tokens the endpoint counted (`counted`).
        """
        conversations = (messages for window in windows for messages in self._ask(window, context_kind, horizons))
        replies = self.endpoint.paid_all(conversations)
        tokens = [(r.prompt_tokens, r.completion_tokens) for r in replies]
        counted = [(prompt, answer) for prompt, answer in tokens if prompt is not None and answer is not None]
        cut = sum(reply.cut for reply in replies)
        counts = {"requests": len(replies), "cut": cut, "counted": len(counted)}
        sums = {"prompt_tokens": sum(p for p, _ in counted), "completion_tokens": sum(a for _, a in counted)}
        return counts | sums

    def _ask(self, window: Window, context_kind: ContextKind, horizons: Sequence[int]) -> Iterator[list[Message]]:
        context = window_context(window, context_kind)
        return (self.shots.messages(window, context, context_kind, k) for k in horizons)
