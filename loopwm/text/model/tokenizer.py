"""Frozen tokenizer: a byte-level BPE trained once on the train text of the text worlds. Adopted decoders keep theirs.

`tokenizer_hash` detects files that were made with another tokenizer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from loopwm.records.errors import InputError, loading
from loopwm.records.template import CONTEXT_LIMIT, END, PAD, SPECIAL_TOKENS

TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")


def load_tokenizer(path: Path | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer in `path` (default: the frozen one), with padding `<|pad|>` and end `<|end|>`.

    Special strings in a text become special tokens: pass only text rendered by `loopwm.records.template`.

    Raises InputError if the file is missing or lacks a special token of the template.
    """
    file = TOKENIZER_FILE if path is None else path
    if not file.is_file():
        raise InputError(f"{file}: no such tokenizer file")
    with loading(file):
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
    return hashlib.sha256((TOKENIZER_FILE if path is None else path).read_bytes()).hexdigest()


PERIODS = (2, 5, 10, 20, 50, 100, 200)
NUMBER_SHARE = 0.8
"""Share of the number's features in an embedding's squared norm; the rest separates tokens of one number."""


def integer_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """Map token ids of whole integers, with and without a leading space, to their values."""
    # U+0120 stands for a leading space in byte-level BPE.
    texts = ((index, token.lstrip("\u0120")) for token, index in tokenizer.get_vocab().items())
    return {index: int(text) for index, text in texts if text.isascii() and text.isdigit()}


def fourier_features(numbers: Tensor) -> Tensor:
    """Return (N, 2 P) cosines and sines of N numbers at the P periods, rows of norm 1: addition is a rotation of them.

    Language models add with these features of a number (Zhou et al. 2024, "Pre-trained Large Language Models Use
    Fourier Features to Compute Addition"; as embeddings: Zhou et al. 2025, FoNE).
    """
    angles = 2 * math.pi * numbers[:, None] / torch.tensor(PERIODS, dtype=numbers.dtype)
    return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(len(PERIODS))


@torch.no_grad()
def start_with_fourier(embedding: Tensor, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> None:
    """Rewrite the integers' rows of an embedding (V, D) with D >= 2 P; each keeps its norm.

    A random isometry, the same for all numbers, maps the features to D dimensions.
    """
    values = integer_tokens(tokenizer)
    rows = torch.tensor(list(values))
    features = fourier_features(torch.tensor(list(values.values()), dtype=embedding.dtype))
    # The Q of a random matrix has orthonormal columns, so distances between numbers stay.
    isometry, _ = torch.linalg.qr(torch.randn(embedding.shape[1], features.shape[1], generator=generator))
    own = embedding[rows]
    norm = own.norm(dim=1, keepdim=True)
    embedding[rows] = math.sqrt(1 - NUMBER_SHARE) * own + math.sqrt(NUMBER_SHARE) * norm * (features @ isometry.T)
