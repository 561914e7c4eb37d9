"""Frozen tokenizer: a byte-level BPE trained once on the train text of the text worlds. Adopted decoders keep theirs.

`tokenizer_hash` detects files that were made with another tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from loopwm.records.errors import InputError
from loopwm.records.template import CONTEXT_LIMIT, END, PAD, SPECIAL_TOKENS

TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")


def load_tokenizer(path: Path | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer in `path` (default: the frozen one), with padding `<|pad|>` and end `<|end|>`.

    Special strings in a text become special tokens: pass only text rendered by `loopwm.records.template`.

    Raises:
        InputError: the file is missing, or lacks a special token of the template.
    """
    file = TOKENIZER_FILE if path is None else path
    if not file.is_file():
        raise InputError(f"{file}: no such tokenizer file")
    tokenizer = world_tokenizer(Tokenizer.from_file(str(file)))
    if missing := set(SPECIAL_TOKENS) - tokenizer.get_vocab().keys():
        raise InputError(f"{file}: must have the tokens {' '.join(SPECIAL_TOKENS)}, lacks {min(missing)}")
    return tokenizer


def world_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer that has the special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, model_max_length=CONTEXT_LIMIT,
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def special_ids(tokenizer: PreTrainedTokenizerFast, tokens: Iterable[str]) -> list[int]:
    """Return the ids of special tokens, in order. Raises KeyError for a token that the tokenizer lacks."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def tokenizer_hash(path: Path | None = None) -> str:
    """Return the SHA-256 of the tokenizer file, in hexadecimal."""
    return hashlib.sha256((TOKENIZER_FILE if path is None else path).read_bytes()).hexdigest()
