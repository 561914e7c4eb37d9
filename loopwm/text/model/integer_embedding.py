"""A start for the embeddings of the integers at which arithmetic is a rotation.

The Fourier features of a number are those that language models are found to add with (Zhou et al. 2024, "Pre-trained
Large Language Models Use Fourier Features to Compute Addition"; as embeddings: Zhou et al. 2025, FoNE).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

PERIODS = (2, 5, 10, 20, 50, 100, 200)
NUMBER_SHARE = 0.8
"""Of an embedding's squared norm, what the number's features have; the rest tells tokens of one number apart."""


def integer_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """Token ids of whole integers, with and without a space before, and their values."""
    texts = ((index, token.lstrip("\u0120")) for token, index in tokenizer.get_vocab().items())
    return {index: int(text) for index, text in texts if text.isascii() and text.isdigit()}


def fourier_features(numbers: Tensor) -> Tensor:
    """(N, 2 P) cosines and sines of N numbers at the P periods, rows of norm 1."""
    angles = 2 * math.pi * numbers[:, None] / torch.tensor(PERIODS, dtype=numbers.dtype)
    return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(len(PERIODS))


@torch.no_grad()
def start_with_fourier(embedding: Tensor, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> None:
    """Rewrites the integers' rows of an embedding (V, D) with D >= 2 P; each keeps its norm.

    The features are turned into the D dimensions by a random isometry, the same for all numbers.
    """
    values = integer_tokens(tokenizer)
    rows = torch.tensor(list(values))
    features = fourier_features(torch.tensor(list(values.values()), dtype=embedding.dtype))
    isometry, _ = torch.linalg.qr(torch.randn(embedding.shape[1], features.shape[1], generator=generator))
    own = embedding[rows]
    norm = own.norm(dim=1, keepdim=True)
    embedding[rows] = math.sqrt(1 - NUMBER_SHARE) * own + math.sqrt(NUMBER_SHARE) * norm * (features @ isometry.T)
