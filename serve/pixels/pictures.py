"""Pictures of both sides of a game: for the terminal, and as a GIF. Arrays: RGB, uint8 (H, W, 3)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopwm.pixel.imagined import painted
from loopwm.records.files import write_atomic
from serve.pixels.game import Moment, cell_size

Array = NDArray[Any]

OUTLINE = (255, 48, 96)
BACKGROUND = (48, 48, 64)
GAP = 4
"""Pixels between and around the sides."""


def picture(moment: Moment, scale: int) -> Array:
    """Draw the sides next to each other, real first, each pixel `scale` wide, with differing cells outlined."""
    parts = []
    for side in moment.sides.values():
        large = np.kron(painted(side.frame), np.ones((scale, scale, 1), np.uint8))
        size = scale * cell_size(side.frame)
        for row, column in np.argwhere(moment.cells):
            _outline(large[row * size : (row + 1) * size, column * size : (column + 1) * size])
        framed = np.full((len(large) + 2 * GAP, large.shape[1] + 2 * GAP, 3), BACKGROUND, np.uint8)
        framed[GAP:-GAP, GAP:-GAP] = large
        parts.append(framed)
    return np.concatenate(parts, 1)


def _outline(cell: Array) -> None:
    """Draw the border of a cell, in place, a twelfth of its side wide but at least a pixel."""
    width = max(1, len(cell) // 12)
    for edge in (cell[:width], cell[-width:], cell[:, :width], cell[:, -width:]):
        edge[:] = OUTLINE


def half_blocks(image: Array, columns: int, lines: int) -> list[str]:
    """Draw an image in 24-bit colours, two pixels above each other a character, every n-th pixel where space is short.

    Args:
        image: (H, W, 3)
        columns: of the terminal
        lines: of the terminal
    """
    every = max(1, -(-image.shape[1] // columns), -(-image.shape[0] // (2 * lines)))
    small = image[::every, ::every]
    if len(small) % 2:
        small = np.concatenate((small, small[-1:]))
    text = []
    for top, bottom in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        line, last = "", None
        for pair in zip(top, bottom, strict=True):
            if pair != last:  # most neighbours are equal, and colours are most of the bytes
                line += "\x1b[38;2;{};{};{};48;2;{};{};{}m".format(*pair[0], *pair[1])
                last = pair
            line += "▀"
        text.append(line + "\x1b[0m")
    return text


def write_gif(path: Path, frames: Sequence[tuple[Moment, str]], per_second: float) -> None:
    """Write moments and their captions as a GIF that repeats. Needs Pillow."""
    from PIL import Image, ImageDraw

    images = []
    for moment, caption in frames:
        sides = picture(moment, max(1, 160 // len(moment.imagined.frame)))
        strip = np.full((14 * len(caption.split("\n")), sides.shape[1], 3), BACKGROUND, np.uint8)
        image = Image.fromarray(np.concatenate((sides, strip)))
        ImageDraw.Draw(image).text((GAP, len(sides) - 2), caption, fill=(255, 255, 255))
        images.append(image.quantize(64))
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=round(1000 / per_second), loop=0)
    write_atomic(path, buffer.getvalue())
