"""Decoders of the study of exact frames, against the product's and against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.pixels.decoders import Argmax, Copy, Sticky, StudyDecoderConfig, Transport
from loopwm.pixel.twisted.decoding import WILDCARD, Decoder, ExactAssignment, NoisedTransport, Sample
from tests.lab.pixels.test_sinkhorn import SOLVERS
from tests.pixel.twisted.test_decoding import EXACT, MOVING, frames, generator


@pytest.mark.parametrize(("c_d", "c_w"), [(0.6, 0.3), (0.2, 0.05)])
@pytest.mark.parametrize("grid", [(9, 9), (5, 5)])
def test_at_the_printed_values_transport_is_the_sticky_rule_token_for_token(grid, c_d, c_w):
    for seed in range(3):
        p, previous = frames(64, grid, 20, seed)
        transport = Transport(grid, c_d, c_w, ExactAssignment())(p, previous, generator(seed))
        sticky = Sticky(c_w)(p, previous, generator(seed))
        assert torch.equal(transport, sticky)
        kept = (transport == previous).float().mean()
        assert 0.2 < kept < 0.8  # both branches are taken


def test_where_copy_and_sample_are_equally_good_both_rules_copy():
    previous = torch.tensor([[0, 1, 2, 0]])
    p = torch.full((1, 4, 4), 0.25)
    for decoder in (Sticky(0.0), Transport((2, 2), 0.3, 0.0, ExactAssignment())):
        assert torch.equal(decoder(p, previous, generator()), previous)


@pytest.mark.parametrize(
    "decoder",
    [Sample(), Sticky(0.1), *(Transport((3, 3), **MOVING, solver=solver) for solver in (EXACT, *SOLVERS))],
    ids=lambda decoder: type(decoder).__name__,
)
def test_decoders_that_sample_draw_the_same_numbers_column_by_column(decoder: Decoder):
    p, previous = frames(50, (3, 3), 9, seed=5)
    drawn, state = generator(7), generator(7)
    expected = Sample()(p, previous, state)
    tokens = decoder(p, previous, drawn)
    assert torch.equal(drawn.get_state(), state.get_state())
    sampled = torch.ones_like(tokens, dtype=torch.bool)
    if isinstance(decoder, Transport):
        sampled = decoder.sources(p, previous) == WILDCARD
    if isinstance(decoder, Sticky):
        sampled = tokens != previous
    assert sampled.any()
    assert torch.equal(tokens[sampled], expected[sampled])


def test_argmax_and_copy_are_what_they_are_called():
    p, previous = frames(5, (3, 3), 6, seed=7)
    assert torch.equal(Argmax()(p, previous, generator()), p.argmax(-1))
    assert torch.equal(Copy()(p, previous, generator()), previous)


def test_the_published_rule_keeps_an_unsure_patch_about_as_often_as_it_stays():
    """Chance 0.48 that it stays: without noise it stays always, behind noise in about two of three cases."""
    p = torch.tensor([[[0.48, 0.52]]]).expand(4000, 1, 2)
    previous, generator = torch.zeros(4000, 1, dtype=torch.int64), torch.Generator().manual_seed(0)
    without = Transport((1, 1), 0.6, 0.3, ExactAssignment())(p, previous, generator)
    noised = NoisedTransport((1, 1), 0.6, 0.3, ExactAssignment())(p, previous, generator)
    assert (without == 0).all()
    stays = (noised == 0).float().mean().item()
    # It stays unless the other is ahead by c_w after noise: softmax gap sigmoid(d) - sigmoid(-d) > 0.3.
    threshold = np.log((1 + 0.3) / (1 - 0.3))
    expected = 1 - 1 / (1 + np.exp(threshold - np.log(0.52 / 0.48)))
    assert stays == pytest.approx(expected, abs=0.03)


def test_study_decoder_refuses_an_impossible_price():
    with pytest.raises(ValueError, match=r"c_w: must be a finite price >= 0, got -0.1"):
        StudyDecoderConfig("sticky", c_w=-0.1).decoder((2, 2), torch.ones(4, dtype=torch.bool))
