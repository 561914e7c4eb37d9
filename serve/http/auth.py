"""API keys: a file of their hashes and of what they may have, and the check that every request but a few must pass.

A line of the file is `NAME SHA256`, the hash in hexadecimal, and limits of this key: any of `requests=60` and
`tokens=10000`, a minute each, `worlds=100`, and `bytes=1000000` of their text. Empty lines and those that begin with
`#` are skipped. Keys must be long and random, such as `openssl rand -hex 24` prints: hashes of guessable ones can be
guessed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loopwm.records.errors import InputError
from serve.generation.rate_limits import RATES, KeyQuota, RateLimiter, RateLimitError
from serve.http.errors import WrongKeyError, problem_of
from serve.playground import FILES

OPEN = (*FILES, "/health", "/metrics", "/openapi.json")
"""Paths that need no key: what watches the service, and pages that hold nothing of it."""

HASH = re.compile(r"[0-9a-f]{64}")
LIMITS = tuple(limit.name for limit in fields(KeyQuota))


class KeyRing:
    """Names of keys by their hashes, and quotas by their names."""

    def __init__(self, hashes: Mapping[str, str], quotas: Mapping[str, KeyQuota] | None = None) -> None:
        self._hashes = hashes
        self.quotas = quotas or {}

    def __len__(self) -> int:
        return len(self._hashes)

    def replace(self, other: KeyRing) -> None:
        """These keys from now on."""
        self._hashes, self.quotas = other._hashes, other.quotas

    def name_of(self, key: bytes) -> str | None:
        """The name of a key, None for one that is not known. How long it takes tells nothing about the keys."""
        given, found = hashlib.sha256(key).hexdigest(), None
        for name, known in self._hashes.items():
            if secrets.compare_digest(known, given):
                found = name
        return found


def read_keys(path: Path) -> KeyRing:
    """Raises InputError."""
    hashes: dict[str, str] = {}
    quotas: dict[str, KeyQuota] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or 'is not text in UTF-8'}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, hashed, quota = _read_line(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        if name in hashes:
            raise InputError(f"{path}, line {number}: there is a key {name!r} already")
        hashes[name], quotas[name] = hashed, quota
    if not hashes:
        raise InputError(f"{path}: holds no keys")
    return KeyRing(hashes, quotas)


def _read_line(line: str) -> tuple[str, str, KeyQuota]:
    """Raises ValueError."""
    name, *told = line.split()
    if not told or not HASH.fullmatch(told[0].lower()):
        raise ValueError("expected NAME and a SHA-256 of 64 hexadecimal digits")
    return name, told[0].lower(), _quota(told[1:])


def _quota(told: Iterable[str]) -> KeyQuota:
    """Of words such as requests=60. Raises ValueError."""
    found: dict[str, int] = {}
    for word in told:
        limit, _, number = word.partition("=")
        if limit not in LIMITS or limit in found:
            raise ValueError(f"{word!r} is no limit, or is told twice: there are {', '.join(LIMITS)}")
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise ValueError(f"{limit}: {number!r} is not a whole number of at least 1")
        found[limit] = int(number)
    return KeyQuota(**found)


class KeyCheck:
    """ASGI middleware: 401 without a key of the ring, 429 for one that has had its requests; `key_name` in the scope
    says whose request it is. What is left to a key stands in the head of every answer."""

    def __init__(self, app: ASGIApp, keys: KeyRing, rate_limiter: RateLimiter) -> None:
        self._app = app
        self._keys, self._rate_limiter = keys, rate_limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            return await self._app(scope, receive, send)
        name = self._keys.name_of(_bearer(scope))
        if name is None:
            return await problem_of(WrongKeyError()).response()(scope, receive, send)
        scope["key_name"] = name
        try:
            self._rate_limiter.check(name, "requests")
        except RateLimitError as error:
            return await problem_of(error).response()(scope, receive, self._telling(name, send))
        self._rate_limiter.charge(name, "requests", 1)
        return await self._app(scope, receive, self._telling(name, send))

    def _telling(self, name: str, send: Send) -> Send:
        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *self._left(name)]}
            await send(message)

        return telling

    def _left(self, name: str) -> list[tuple[bytes, bytes]]:
        """By OpenAI's names of headers. reset: seconds until all is there again."""
        told: list[tuple[str, str]] = []
        for rate in RATES:
            if (bucket := self._rate_limiter.bucket(name, rate)) is not None:
                told.append((f"x-ratelimit-limit-{rate}", str(bucket.limit)))
                told.append((f"x-ratelimit-remaining-{rate}", str(max(0, int(bucket.level)))))
                told.append((f"x-ratelimit-reset-{rate}", f"{bucket.seconds(bucket.limit)}s"))
        return [(header.encode(), value.encode()) for header, value in told]


def _bearer(scope: Scope) -> bytes:
    scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
