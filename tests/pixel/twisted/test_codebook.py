from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from loopwm.pixel.twisted import codebook as tokenizer_module
from loopwm.pixel.twisted.codebook import PatchTokenizer, first_occurrences, squared_distances
from tests.reference.patches import Codebook, squared_distance

SHAPE, PATCH = (6, 9, 3), (2, 3)


def noisy_tiles(count: int, seed: int, kinds: int = 6, noise: int = 40) -> Tensor:
    """Frames laid with few kinds of tiles, some of them with noise: uint8 (count, *SHAPE)."""
    rng = np.random.default_rng(seed)
    tiles = rng.integers(0, 256, (kinds, *PATCH, SHAPE[2]))
    rows, columns = SHAPE[0] // PATCH[0], SHAPE[1] // PATCH[1]
    laid = tiles[rng.integers(kinds, size=(count, rows, columns))]
    laid = laid + rng.integers(-noise, noise + 1, laid.shape) * (rng.random((count, rows, columns, 1, 1, 1)) < 0.5)
    frames = laid.clip(0, 255).astype(np.uint8).transpose(0, 1, 3, 2, 4, 5).reshape(count, *SHAPE)
    return torch.from_numpy(np.ascontiguousarray(frames))


@pytest.fixture
def grown() -> PatchTokenizer:
    tokenizer = PatchTokenizer(SHAPE, PATCH, threshold=0.05)
    tokenizer.grow(noisy_tiles(20, seed=0))
    return tokenizer


@pytest.mark.parametrize(("capacity", "threshold"), [(4096, 0.75), (4096, 0.05), (20, 0.05), (1, 0.0), (60, 0.0)])
def test_growth_and_codes_equal_the_slow_reference(monkeypatch, capacity, threshold):
    monkeypatch.setattr(tokenizer_module, "BLOCK", 40)  # several blocks of 4 frames, and a rest
    tokenizer = PatchTokenizer(SHAPE, PATCH, capacity, threshold)
    reference = Codebook(PATCH, capacity, threshold)
    for seed in (0, 0, 1):
        frames, before = noisy_tiles(10, seed), reference.refused
        refused = tokenizer.grow(frames.view(2, 5, *SHAPE))
        reference.grow(frames.numpy())
        assert (tokenizer.size, refused) == (len(reference.codes), reference.refused - before)
    assert tokenizer.codes.tolist() == [code.ravel().tolist() for code in reference.codes]
    new = noisy_tiles(10, seed=2)
    tokens = tokenizer.encode(new)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [reference.encode(frame) for frame in new.numpy()]


def test_a_full_codebook_counts_the_patches_it_refuses_each_time():
    tokenizer = PatchTokenizer((1, 4, 1), (1, 1), capacity=2, threshold=0.01)
    frame = torch.tensor([0, 200, 255, 255], dtype=torch.uint8).view(1, 4, 1)
    assert tokenizer.grow(frame) == 2
    assert tokenizer.size == 2
    assert (tokenizer.grow(frame), tokenizer.size) == (2, 2)
    assert tokenizer.encode(frame).tolist() == [0, 1, 1, 1]


def test_a_patch_at_the_threshold_is_near_and_beyond_it_far():
    pixels = torch.tensor([[0, 255]], dtype=torch.uint8).view(1, 2, 1)
    for threshold, codes in ((1.0, 1), (0.999999, 2)):
        tokenizer = PatchTokenizer((1, 2, 1), (1, 1), threshold=threshold)
        tokenizer.grow(pixels)
        assert tokenizer.size == codes


def test_frames_of_known_patches_survive_the_round_trip():
    frames = noisy_tiles(12, seed=3).view(3, 4, *SHAPE)
    tokenizer = PatchTokenizer(SHAPE, PATCH, threshold=0.0)
    assert tokenizer.grow(frames) == 0
    tokens = tokenizer.encode(frames)
    assert tokens.shape == (3, 4, 9)
    assert torch.equal(tokenizer.decode(tokens), frames)


def test_token_i_lies_at_row_i_over_columns(grown):
    assert grown.grid == (3, 3)
    assert grown.tokens_per_frame == 9
    tokens = torch.zeros(9, dtype=torch.int64)
    tokens[5] = 1
    changed = (grown.decode(tokens) != grown.decode(torch.zeros_like(tokens))).any(-1)
    ys, xs = changed.nonzero(as_tuple=True)
    assert set(ys.tolist()) <= {2, 3}
    assert set(xs.tolist()) <= {6, 7, 8}
    assert len(ys)


def test_equally_near_codes_give_the_lowest_token():
    tokenizer = PatchTokenizer((1, 3, 1), (1, 1), threshold=0.0)
    tokenizer.grow(torch.tensor([20, 10, 30], dtype=torch.uint8).view(1, 3, 1))
    assert tokenizer.encode(torch.tensor([15, 25, 30], dtype=torch.uint8).view(1, 3, 1)).tolist() == [0, 0, 2]


@pytest.mark.parametrize("size", [1, 147, 258, 300])
def test_distances_are_exact_whole_numbers(size):
    rng = np.random.default_rng(size)
    patches = rng.integers(0, 256, (20, size), dtype=np.uint8)
    patches[0], patches[1] = 0, 255  # as far as can be
    found = squared_distances(torch.from_numpy(patches), torch.from_numpy(patches[:7]))
    assert found.tolist() == [[squared_distance(x, c) for c in patches[:7]] for x in patches]


@pytest.mark.parametrize("collide", [False, True])
def test_distinct_patches_come_in_order_of_first_occurrence(monkeypatch, collide):
    if collide:
        monkeypatch.setattr(tokenizer_module, "_multipliers", lambda words: torch.zeros_like(words[0]))
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 3, (60, 3), dtype=np.uint8))
    distinct, inverse = first_occurrences(rows)
    assert torch.equal(distinct[inverse], rows)
    assert distinct.tolist() == [list(row) for row in dict.fromkeys(map(tuple, rows.tolist()))]


def test_taken_codes_go_on_where_they_were(grown):
    other = PatchTokenizer(SHAPE, PATCH, threshold=0.05)
    other.take_codes(grown.codes)
    later = noisy_tiles(20, seed=5)
    assert other.grow(later) == grown.grow(later)
    assert torch.equal(other.encode(later), grown.encode(later))


@pytest.mark.parametrize(
    "codes", [torch.zeros(2, 17, dtype=torch.uint8), torch.zeros(2, 18), torch.zeros(5000, 18).byte()]
)
def test_codes_of_other_settings_are_refused(codes):
    with pytest.raises(ValueError, match="codes: must fit the tokenizer's settings"):
        PatchTokenizer(SHAPE, PATCH).take_codes(codes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch": (4, 3)}, "patch: must divide frames of 6 x 9, got 4 x 3"),
        ({"patch": (0, 3)}, "patch: must divide frames of 6 x 9, got 0 x 3"),
        ({"capacity": 0}, "capacity: must be at least 1, got 0"),
        ({"threshold": -0.1}, "threshold: must be a squared distance, got -0.1"),
        ({"threshold": float("nan")}, "threshold: must be a squared distance, got nan"),
    ],
)
def test_impossible_settings_are_one_line(settings, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        PatchTokenizer(**{"frame_shape": SHAPE, "patch": PATCH, **settings})
    assert str(caught.value) == message


def test_other_frames_and_tokens_are_refused(grown):
    with pytest.raises(ValueError, match=r"^frames: must be uint8 .*, got torch.float32 \(6, 9, 3\)"):
        grown.encode(torch.zeros(SHAPE))
    with pytest.raises(ValueError, match=r"^frames: .*, got torch.uint8 \(2, 6, 3, 3\)"):
        grown.grow(torch.zeros(2, 6, 3, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"^tokens: shape must end in 9"):
        grown.decode(torch.zeros(8, dtype=torch.int64))
    for token in (-1, grown.size):
        with pytest.raises(ValueError, match=r"^tokens: must be below"):
            grown.decode(torch.tensor([0] * 8 + [token]))
    with pytest.raises(ValueError, match="codebook is empty"):
        PatchTokenizer(SHAPE, PATCH).encode(noisy_tiles(1, 0))


def test_no_frames_are_no_tokens(grown):
    none = torch.empty(0, *SHAPE, dtype=torch.uint8)
    assert grown.grow(none) == 0
    assert grown.encode(none).shape == (0, 9)
    assert grown.decode(grown.encode(none)).shape == none.shape
