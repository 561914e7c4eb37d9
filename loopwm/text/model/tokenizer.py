"""Frozen tokenizer: a byte-level BPE trained once on the train text of the text worlds.

`tokenizer_hash` detects files that were made with another tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from loopwm.records.template import CONTEXT_LIMIT, END, PAD, SPECIAL_TOKENS

TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")


def load_tokenizer(path: Path | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer in `path` (default: the frozen one), with padding `<|pad|>` and end `<|end|>`.

    Special strings in a text become special tokens: pass only text rendered by `loopwm.records.template`.

    Raises:
        ValueError: the file is missing, or its special tokens are not `SPECIAL_TOKENS` at ids 0..8.
    """
    file = TOKENIZER_FILE if path is None else path
    if not file.is_file():
        raise ValueError(f"{file}: no such tokenizer file")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(file), pad_token=PAD, eos_token=END, model_max_length=CONTEXT_LIMIT,
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    if tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) != list(SPECIAL_TOKENS):
        raise ValueError(f"{file}: must start with the tokens {' '.join(SPECIAL_TOKENS)}")
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerFast, tokens: Iterable[str]) -> list[int]:
    """Return the ids of special tokens, in order. Raises KeyError for a token that the tokenizer lacks."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def tokenizer_hash(path: Path | None = None) -> str:
    """Return the SHA-256 of the tokenizer file, in hexadecimal."""
    return hashlib.sha256((TOKENIZER_FILE if path is None else path).read_bytes()).hexdigest()
