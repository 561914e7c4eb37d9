"""API keys: a file of their hashes and quotas.

A line of the file is `NAME SHA256`, the hash in hexadecimal, and limits of this key: any of `requests=60` and
`tokens=10000` per minute, `concurrent=8` requests at a time, `worlds=100`, and `bytes=1000000` of their text. Empty
lines and lines that begin with `#` are skipped. Keys must be long and random, such as `openssl rand -hex 24` prints:
hashes of guessable keys can be reversed by guessing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from starlette.types import Scope

from loopwm.records.errors import InputError, naming
from serve.generation.rate_limits import KeyQuota
from serve.playground import FILES

OPEN = (*FILES, "/health", "/ready", "/metrics", "/openapi.json")
"""Paths that need no key: monitoring, and pages without data."""

HASH = re.compile(r"[0-9a-f]{64}")
LIMITS = tuple(limit.name for limit in fields(KeyQuota))


class KeyRing:
    """Key names by hash, and quotas by key name."""

    def __init__(self, hashes: Mapping[str, str], quotas: Mapping[str, KeyQuota] | None = None) -> None:
        self._hashes = hashes
        self.quotas = quotas or {}

    def __len__(self) -> int:
        return len(self._hashes)

    def replace(self, other: KeyRing) -> None:
        self._hashes, self.quotas = other._hashes, other.quotas

    def name_of(self, key: bytes) -> str | None:
        digest, match = hashlib.sha256(key).hexdigest(), None
        # Compares with all keys in constant time: the duration must not depend on which one matches.
        for name, key_digest in self._hashes.items():
            if secrets.compare_digest(key_digest, digest):
                match = name
        return match


def read_keys(path: Path) -> KeyRing:
    """Read a key file. Raises InputError."""
    hashes: dict[str, str] = {}
    quotas: dict[str, KeyQuota] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or 'is not text in UTF-8'}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, *words = line.split()
        with naming(f"{path}, line {number}: ", ValueError):
            if not words or not HASH.fullmatch(words[0].lower()):
                raise ValueError("must be NAME and a SHA-256 of 64 hexadecimal digits")
            quota = _quota(words[1:])
        if name in hashes:
            raise InputError(f"{path}, line {number}: duplicate key name {name!r}")
        hashes[name], quotas[name] = words[0].lower(), quota
    if not hashes:
        raise InputError(f"{path}: must contain at least one key")
    return KeyRing(hashes, quotas)


def _quota(words: Iterable[str]) -> KeyQuota:
    """Parse words such as requests=60. Raises ValueError."""
    limits: dict[str, int] = {}
    for word in words:
        limit, _, number = word.partition("=")
        if limit not in LIMITS:
            raise ValueError(f"{limit}: must be one of {', '.join(LIMITS)}")
        if limit in limits:
            raise ValueError(f"{limit}: given twice")
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise ValueError(f"{limit}: must be a whole number of at least 1, got {number!r}")
        limits[limit] = int(number)
    return KeyQuota(**limits)


def bearer_token(scope: Scope) -> bytes:
    """Return the token of the Authorization header, empty if there is none."""
    scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
