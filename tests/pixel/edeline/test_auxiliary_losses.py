"""What a memory is taught of the next frame: a picture's error place by place, and which frame comes."""

from __future__ import annotations

import math

import pytest
import torch

from loopwm.pixel.edeline.auxiliary_losses import SMALLEST, TEMPERATURE, Contrast, Preview, unique_frames


@torch.no_grad()
def test_the_pictures_error_is_the_mean_over_places_of_roots():
    torch.manual_seed(0)
    preview, laid, frames = Preview(3, 2, 2), torch.randn(2, 3, 2, 3), torch.randn(2, 2, 4, 6)
    picture = preview(laid)
    for row in range(2):
        roots = []
        for y in range(0, 4, 2):
            for x in range(0, 6, 2):
                off = (picture - frames)[row, :, y : y + 2, x : x + 2]
                roots.append(math.sqrt(sum(e * e for e in off.flatten().tolist()) / 8 + SMALLEST))
        assert preview.error(laid, frames)[row].item() == pytest.approx(sum(roots) / 6, rel=1e-5)


@torch.no_grad()
def test_a_place_of_the_picture_is_drawn_from_its_own_channels_alone():
    preview, laid = Preview(3, 2, 2), torch.zeros(1, 3, 2, 3)
    touched = laid.clone()
    touched[0, :, 1, 2] = 1
    changed = (preview(touched) != preview(laid)).any(1)[0]
    assert changed[2:, 4:].all()
    assert changed.sum() == 4


@torch.no_grad()
def test_the_frame_that_comes_is_told_by_cosines():
    torch.manual_seed(0)
    contrast, h, encoded = Contrast(4, 5), torch.randn(3, 4), torch.randn(2, 5)
    which = torch.tensor([1, 0, 1])
    for n in range(3):
        query, keys = contrast.query(h[n]), contrast.key(encoded)
        near = [float(query @ key / (query.norm() * key.norm())) / TEMPERATURE for key in keys]
        wanted = math.log(sum(map(math.exp, near))) - near[int(which[n])]
        assert contrast.error(h, encoded, which)[n].item() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_frames_that_are_alike_are_one_and_a_pixel_makes_two():
    frames = torch.zeros(4, 2, 3, 1, dtype=torch.uint8)
    frames[2, 1, 2] = 1
    rows, which = unique_frames(frames)
    assert len(rows) == 2
    assert torch.equal(rows[which], frames)
