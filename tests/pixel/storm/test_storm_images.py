"""Frames that STORM decodes."""

from __future__ import annotations

import torch

from loopwm.pixel.storm.images import SmallImages, StridedImages


def test_a_small_frame_has_the_likelier_value_of_each_pixel() -> None:
    logits = torch.tensor([-3.0, -0.1, 0.1, 3.0]).view(1, 1, 2, 2)
    assert SmallImages.frames(logits).flatten().tolist() == [0, 0, 255, 255]


def test_a_strided_frame_is_clipped_and_rounded() -> None:
    decoded = torch.tensor([-1.0, 0.0, 0.1, 2.0]).view(1, 1, 2, 2)
    assert StridedImages.frames(decoded).flatten().tolist() == [0, 0, 26, 255]
