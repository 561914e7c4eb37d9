"""Initial embeddings of the integers under which addition is a rotation.

Language models add with these Fourier features of a number (Zhou et al. 2024, "Pre-trained Large Language Models Use
Fourier Features to Compute Addition"; as embeddings: Zhou et al. 2025, FoNE).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

PERIODS = (2, 5, 10, 20, 50, 100, 200)
NUMBER_SHARE = 0.8
"""Share of the number's features in an embedding's squared norm; the rest separates tokens of one number."""


def integer_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[int, int]:
    """Map token ids of whole integers, with and without a leading space, to their values."""
    # U+0120 stands for a leading space in byte-level BPE.
    texts = ((index, token.lstrip("\u0120")) for token, index in tokenizer.get_vocab().items())
    return {index: int(text) for index, text in texts if text.isascii() and text.isdigit()}


def fourier_features(numbers: Tensor) -> Tensor:
    """Return (N, 2 P) cosines and sines of N numbers at the P periods, rows of norm 1."""
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
