"""What is drawn follows the distribution that was asked for."""

from __future__ import annotations

import pytest
import torch

from serve.engine.sampling import SamplingParams, keep_top_p, sample


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    assert keep_top_p(probabilities, 0.7).tolist() == pytest.approx([0, 0.5, 0, 0.25])
    assert keep_top_p(probabilities, 0.75).tolist() == pytest.approx([0, 0.5, 0, 0.25])
    for tiny in (0.01, 1e-46):  # the second is zero in float32
        assert keep_top_p(probabilities, tiny).tolist() == pytest.approx([0, 0.5, 0, 0])


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0])
    sampling = SamplingParams(temperature=2.0, seed=1)
    generator = sampling.generator()
    draws = torch.tensor([sample(logits, sampling, generator) for _ in range(4000)])
    shares = torch.bincount(draws, minlength=3) / len(draws)
    torch.testing.assert_close(shares, (logits / 2).softmax(-1), atol=0.03, rtol=0)
