"""API keys: a file of their hashes, and the check that every request but a few must pass.

A line of the file is `NAME SHA256`, the hash in hexadecimal; empty lines and those that begin with `#` are skipped.
Keys must be long and random, such as `openssl rand -hex 24` prints: hashes of guessable ones can be guessed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from loopwm.records.errors import InputError
from serve.http.errors import WrongKeyError, problem_of
from serve.playground import FILES

OPEN = (*FILES, "/health", "/metrics", "/openapi.json")
"""Paths that need no key: what watches the service, and pages that hold nothing of it."""

HASH = re.compile(r"[0-9a-f]{64}")


class KeyRing:
    """Names of keys by their hashes."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = hashes

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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or 'is not text in UTF-8'}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, hashed = line.strip().partition(" ")
        hashed = hashed.strip().lower()
        if not HASH.fullmatch(hashed):
            raise InputError(f"{path}, line {number}: expected NAME and a SHA-256 of 64 hexadecimal digits")
        if name in hashes:
            raise InputError(f"{path}, line {number}: there is a key {name!r} already")
        hashes[name] = hashed
    if not hashes:
        raise InputError(f"{path}: holds no keys")
    return KeyRing(hashes)


class KeyCheck:
    """ASGI middleware: 401 without a key of the ring; `key_name` in the scope says whose request it is."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            name = self._keys.name_of(_bearer(scope))
            if name is None:
                await problem_of(WrongKeyError()).response()(scope, receive, send)
                return
            scope["key_name"] = name
        await self._app(scope, receive, send)


def _bearer(scope: Scope) -> bytes:
    scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
