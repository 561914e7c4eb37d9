"""A reader who knows the field finds a concept by its usual name: a file, a folder or a public class or function.

A name matches a term if it begins or ends with its words, whatever the case, separators and plural: `PrefixCache`
and `prefix_cache.py` match "prefix cache", and `auth.py` matches "auth".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("loopwm", "data_prep", "eval", "serve", "lab")
FOUND_AT_LEAST = 50

TERMS = """
    prefix cache, KV cache, scheduler, sampling, prefill, decoding, beam search, detokenizer, prompt logprobs,
    batch, sequence, request, rate limits, auth, middleware, SSE, metrics, sessions, routes, errors,
    playground, chat template, tokenizer, vocabulary, data loader, sampler, collate, shards, curriculum, checkpoint,
    trainer, optimizer, Muon, AdamW, learning rate, warmup, loss, config, preset, attention,
    RMS norm, MLP, rotary, block, embedding, heads, halting, exit gate, baseline, leaderboard,
    results, intervals, compare, report, ablation, world model, rollout, replay, environment, policy,
    actor critic, PPO, diffusion
"""


def words(name: str) -> tuple[str, ...]:
    """Split a name at separators and changes of case; lower case and singular."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return tuple(part.lower().removesuffix("s") for part in parts)


def names() -> Iterator[str]:
    """Yield files and folders of the packages, and public classes and functions of their modules."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        yield path.parent.name if path.stem == "__init__" else path.stem
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                yield node.name


def is_found(term: str, known: set[tuple[str, ...]]) -> bool:
    wanted = words(term)
    return any(wanted in (name[: len(wanted)], name[-len(wanted) :]) for name in known)


def missing_terms() -> list[str]:
    known = {words(name) for name in names()}
    return [term for term in terms() if not is_found(term, known)]


def terms() -> list[str]:
    return [term.strip() for term in TERMS.replace("\n", " ").split(",")]


def test_field_terms_are_found_by_name():
    assert len(set(terms())) == 63
    missing = missing_terms()
    assert len(terms()) - len(missing) >= FOUND_AT_LEAST, missing


def test_matching_ignores_case_separators_and_plural():
    known = {words("PrefixCache"), words("rate_limits"), words("KVCache"), words("check_auth_header")}
    assert all(is_found(term, known) for term in ("prefix cache", "rate limit", "KV cache"))
    assert not is_found("auth", known)
    assert not is_found("cache prefix", known)
