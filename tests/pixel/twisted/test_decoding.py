from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from loopwm.pixel.twisted.decoding import (
    WILDCARD,
    Centre,
    ExactAssignment,
    NoisedTransport,
    Sample,
    affinities,
    copy_price,
    invert,
    with_gumbel_noise,
)
from tests.reference import transport as reference

EXACT = ExactAssignment()
MOVING = {"c_d": 0.05, "c_w": 0.6}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frames(batch: int, grid: tuple[int, int], codes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Peaked probabilities (B, L, K) that often favour the old token or its left neighbour's, and old tokens (B, L)."""
    draw = generator(seed)
    count = math.prod(grid)
    previous = torch.randint(codes, (batch, count), generator=draw)
    logits = 3 * torch.randn(batch, count, codes, generator=draw)
    for tokens in (previous, previous.roll(1, dims=1)):
        logits.scatter_add_(-1, tokens[..., None], 8 * torch.rand(batch, count, 1, generator=draw))
    return logits.softmax(-1), previous


def problems(batch: int, grid: tuple[int, int], c_d: float, c_w: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    p, previous = frames(batch, grid, 8, seed)
    return affinities(p, previous, copy_price(grid, c_d), c_w)


def objectives(copy: Tensor, wildcard: Tensor, sources: Tensor) -> Tensor:
    """What equation 3 maximises, of each problem's plan: (B,)."""
    copied = copy.mT.gather(-1, sources.clamp(min=0)[..., None])[..., 0]
    return torch.where(sources == WILDCARD, wildcard, copied).sum(-1)


def whole(copy: Tensor, wildcard: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """One problem's two square matrices, as the paper has them."""
    gen = np.full(copy.shape, -np.inf)
    np.fill_diagonal(gen, wildcard.double())
    return copy.double().numpy(), gen


def test_affinities_are_those_of_equations_1_and_2_by_hand():
    # places   0 1     u  2 0     distances of 1 along an edge, 2 across
    #          2 3        0 1
    previous = torch.tensor([[2, 0, 0, 1]])
    p = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.5, 0.0], [0.0, 0.1, 0.9]]])
    copy, wildcard = affinities(p, previous, copy_price((2, 2), 0.1), 0.25)
    by_hand = [  # destination:
        #    0           1           2           3
        [0.1, 0.6 - 0.1, 0.0 - 0.1, 0.9 - 0.2],  # source 0, token 2
        [0.7 - 0.1, 0.1, 0.5 - 0.2, 0.0 - 0.1],  # source 1, token 0
        [0.7 - 0.1, 0.1 - 0.2, 0.5, 0.0 - 0.1],  # source 2, token 0
        [0.2 - 0.2, 0.3 - 0.1, 0.5 - 0.1, 0.1],  # source 3, token 1
    ]
    torch.testing.assert_close(copy, torch.tensor([by_hand]))
    torch.testing.assert_close(wildcard, torch.tensor([[0.45, 0.35, 0.25, 0.65]]))


def test_affinities_equal_the_paper_as_loops():
    p, previous = frames(3, (4, 5), 6, seed=1)
    copy, wildcard = affinities(p, previous, copy_price((4, 5), 0.3), 0.2)
    for row in range(3):
        prev, gen = reference.affinities(p[row].double().numpy(), previous[row].tolist(), (4, 5), 0.3, 0.2)
        np.testing.assert_allclose(copy[row], prev, atol=1e-6)
        np.testing.assert_allclose(wildcard[row], gen.diagonal(), atol=1e-6)


@pytest.mark.parametrize("c_d", [0.0, 0.3])
def test_nothing_is_copied_over_more_than_a_squared_distance_of_4(c_d):
    price = copy_price((5, 5), c_d)[12].view(5, 5)  # from the middle
    inf = math.inf
    squares = [[inf, inf, 4, inf, inf], [inf, 2, 1, 2, inf], [4, 1, 0, 1, 4]]
    expected = torch.tensor(squares + squares[1::-1])
    torch.testing.assert_close(price, torch.where(expected < inf, c_d * expected, inf))


@pytest.mark.parametrize(("c_d", "c_w"), [(0.05, 0.6), (0.6, 0.3), (0.2, 0.05), (0.0, 0.0)])
def test_exact_assignment_finds_the_best_of_all_plans(c_d, c_w):
    copy, wildcard = problems(8, (2, 3), c_d, c_w)
    found = objectives(copy, wildcard, ExactAssignment()(copy, wildcard))
    best = [reference.best_objective(*whole(copy[row], wildcard[row])) for row in range(8)]
    torch.testing.assert_close(found, torch.tensor(best), rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("solver", [EXACT])
@pytest.mark.parametrize(("c_d", "c_w"), [(0.05, 0.6), (0.6, 0.3), (0.0, 1.0)])
def test_nothing_is_copied_twice(solver, c_d, c_w):
    p, previous = frames(100, (5, 5), 3, seed=2)  # few codes: many places want the same
    for sources in NoisedTransport((5, 5), c_d, c_w, solver).sources(p, previous).tolist():
        used = [source for source in sources if source != WILDCARD]
        assert used
        assert len(used) == len(set(used))


@pytest.mark.parametrize("solver", [EXACT])
def test_the_best_copy_is_kept_in_place_when_the_model_is_sure_of_it(solver):
    previous = torch.randint(4, (8, 25), generator=generator())
    p = torch.nn.functional.one_hot(previous, 4).float()
    for c_d, c_w in ((0.6, 0.3), (0.05, 0.6)):
        transport = NoisedTransport((5, 5), c_d, c_w, solver)
        assert torch.equal(transport.sources(p, previous), torch.arange(25).expand(8, 25))
        assert torch.equal(transport(p, previous, generator()), previous)


@pytest.mark.parametrize("solver", [EXACT])
def test_a_token_that_moved_is_copied_at_a_low_price_of_distance_and_not_at_the_printed_one(solver):
    grass, cow, sand = 0, 1, 2
    previous = torch.tensor([[sand, sand, sand, cow, grass, sand, sand, sand, sand]])
    p = torch.zeros(1, 9, 3)
    p[:, :, sand] = 1
    p[0, 3] = torch.tensor([0.9, 0.1, 0.0])  # where the cow was
    p[0, 4] = torch.tensor([0.35, 0.5, 0.15])  # where it went, of which the model is not sure
    moving, printed = NoisedTransport((3, 3), **MOVING, solver=solver), NoisedTransport((3, 3), 0.6, 0.3, solver)
    assert moving.sources(p, previous)[0, 3:5].tolist() == [4, 3]
    assert printed.sources(p, previous)[0, 4].item() in (4, WILDCARD)


@pytest.mark.parametrize("solver", [EXACT])
def test_outside_the_region_tokens_are_sampled_and_no_copy_crosses_its_border(solver):
    grid, region = (5, 6), Centre(edge=1, bottom_rows=1).region((5, 6))
    p, previous = frames(40, grid, 6, seed=4)
    transport = NoisedTransport(grid, **MOVING, solver=solver, region=region)
    sources = transport.sources(p, previous)
    assert (sources[:, ~region] == WILDCARD).all()
    copied = sources[sources != WILDCARD]
    assert region[copied].all()
    assert len(copied)
    inside = NoisedTransport((2, 4), **MOVING, solver=solver).sources(p[:, region], previous[:, region])
    places = region.nonzero()[:, 0]
    assert torch.equal(sources[:, region], torch.where(inside == WILDCARD, WILDCARD, places[inside]))


def test_the_region_of_crafter_is_the_map_without_its_edges():
    rows = Centre(edge=1, bottom_rows=2).region((9, 9)).view(9, 9).int().tolist()
    middle = [0] + [1] * 7 + [0]
    assert rows == [[0] * 9] + [middle] * 5 + [[0] * 9] * 3


def test_samples_are_the_inverse_of_the_cumulated_probabilities():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(7, 6)
    u = torch.tensor([0.0, 0.249, 0.25, 0.749, 0.75, 0.9999999, 1.0])
    assert invert(p, u).tolist() == [1, 1, 3, 3, 4, 4, 4]
    p, _ = frames(20, (3, 3), 11, seed=6)
    u = torch.rand(20, 9, generator=generator(1))
    expected = [
        [reference.sample(row, x) for row, x in zip(frame, xs, strict=True)]
        for frame, xs in zip(p.double().numpy(), u.tolist(), strict=True)
    ]
    assert invert(p, u).tolist() == expected


def test_samples_follow_their_probabilities():
    p = torch.tensor([0.05, 0.0, 0.6, 0.35]).expand(1, 40_000, 4)
    shares = Sample()(p, torch.zeros(1, 40_000, dtype=torch.int64), generator())[0].bincount(minlength=4) / 40_000
    assert shares[1] == 0
    torch.testing.assert_close(shares, p[0, 0], atol=0.01, rtol=0)


@pytest.mark.parametrize("solver", [EXACT])
def test_a_frame_is_decoded_alone_as_in_a_batch(solver):
    p, previous = frames(6, (4, 4), 5, seed=8)
    transport = NoisedTransport((4, 4), **MOVING, solver=solver)
    together = transport.sources(p, previous)
    assert torch.equal(torch.cat([transport.sources(p[i : i + 1], previous[i : i + 1]) for i in range(6)]), together)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: NoisedTransport((2, 2), math.nan, 0.1, EXACT),
            "c_d: must be a finite price >= 0, got nan",
        ),
        (
            lambda: NoisedTransport((2, 2), 0.1, math.inf, EXACT),
            "c_w: must be a finite price >= 0, got inf",
        ),
        (
            lambda: NoisedTransport((2, 2), 0.1, 0.1, EXACT, region=torch.ones(5, dtype=torch.bool)),
            "region: must be 4 bools, one per token, at least one True",
        ),
        (
            lambda: Centre(2, 1).region((5, 9)),
            "region: must leave part of (5, 9), got edge 2, bottom_rows 1",
        ),
        (
            lambda: NoisedTransport((2, 2), 0.1, 0.1, EXACT).sources(torch.ones(1, 9, 3), torch.ones(1, 9).long()),
            "p, previous: must be probabilities and tokens of 4 places, got (1, 9, 3) and (1, 9)",
        ),
    ],
)
def test_impossible_settings_are_one_line(make, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    assert str(caught.value) == message


def test_without_scipy_exact_assignment_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"^exact assignment needs scipy: pip install 'loopwm\[pixel\]'$"):
        ExactAssignment()


def test_the_noised_maximum_is_a_sample():
    p = torch.tensor([0.1, 0.2, 0.7, 0.0]).expand(20000, 1, 4)
    noised = with_gumbel_noise(p, torch.Generator().manual_seed(0))
    assert torch.allclose(noised.sum(-1), torch.ones(20000, 1))
    shares = torch.bincount(noised.argmax(-1).flatten(), minlength=4) / 20000
    assert torch.allclose(shares, p[0, 0], atol=0.015)
