"""Limits of the service that its options set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the engine.

    max_batch: requests that decode at a time; up to twice as many where keys below their share of rows join.
    max_queue: requests that may wait in addition; a key below its share of all places is admitted beyond them.
    prefill_tokens_with_decodes: prefill tokens between two decode steps; scaled by waiting / decoding if more wait.
    max_num_batched_tokens: most prefill tokens of a step, and of one without decodes.
    cache_bytes: budget of all KV caches, running and cached; running requests may exceed it by what they decode.
    """

    max_batch: int = 64
    max_queue: int = 128
    prefill_tokens_with_decodes: int = 64
    max_num_batched_tokens: int = 512
    cache_bytes: int = 2 << 30


@dataclass(frozen=True)
class WorldLimits:
    """Limits of the store.

    ttl: seconds without use after which a world expires.
    max_worlds: worlds per key without a quota of its own.
    """

    ttl: float = 3600.0
    max_worlds: int = 4096
