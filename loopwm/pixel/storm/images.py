"""STORM's image encoder and decoder (STORM, tables 2 and 3), and a variant for small frames."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = 16
"""Maximum side in pixels of frames that need no strides."""


class StridedImages(nn.Module):
    """Strided encoder and decoder of tables 2 and 3, compared by squared error."""

    def __init__(self, frame_shape: tuple[int, int, int], latent: int, stem: int, halvings: int) -> None:
        """Create the networks. Raises ValueError if the strides do not divide the frame."""
        super().__init__()
        height, width, channels = frame_shape
        step = 2**halvings
        if height % step or width % step:
            raise ValueError(f"halvings: must divide frames into {step} x {step}, got {height} x {width}")
        widths = [channels, *(stem * 2**i for i in range(halvings))]
        down: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            down += [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        flat = widths[-1] * (height // step) * (width // step)
        self.encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(flat, latent))
        up: list[nn.Module] = []
        for inputs, outputs in pairwise(widths[:0:-1]):
            up += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.decoder = nn.Sequential(
            nn.Linear(latent, flat, bias=False),
            nn.Unflatten(1, (widths[-1], height // step, width // step)),
            nn.BatchNorm2d(widths[-1]),
            nn.ReLU(),
            *up,
            nn.ConvTranspose2d(widths[1], channels, 4, 2, 1),
        )

    @staticmethod
    def compare(decoded: Tensor, target: Tensor) -> Tensor:
        """Return the squared error (N,) of decoder output and target frames, both (N, C, H, W)."""
        return (decoded - target).square().sum((1, 2, 3))

    @staticmethod
    def frames(decoded: Tensor) -> Tensor:
        return (decoded.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


class SmallImages(nn.Module):
    """Encoder and decoder of binary frames up to 16 pixels: two full-resolution convolutions each."""

    def __init__(self, frame_shape: tuple[int, int, int], latent: int, stem: int, halvings: int) -> None:
        """Create the networks. Raises ValueError if the frame is larger."""
        super().__init__()
        height, width, channels = frame_shape
        if max(height, width) > SMALL:
            raise ValueError(f"image: small frames must be at most {SMALL} x {SMALL}, got {height} x {width}")
        deep = 2 * stem
        self.encoder = nn.Sequential(
            *(nn.Conv2d(channels, stem, 3, padding=1, bias=False), nn.BatchNorm2d(stem), nn.ReLU()),
            *(nn.Conv2d(stem, deep, 3, padding=1, bias=False), nn.BatchNorm2d(deep), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(deep * height * width, latent)),
        )
        self.decoder = nn.Sequential(
            *(nn.Linear(latent, deep * height * width, bias=False), nn.Unflatten(1, (deep, height, width))),
            *(nn.BatchNorm2d(deep), nn.ReLU(), nn.Conv2d(deep, stem, 3, padding=1, bias=False)),
            *(nn.BatchNorm2d(stem), nn.ReLU(), nn.Conv2d(stem, channels, 3, padding=1)),
        )

    @staticmethod
    def compare(decoded: Tensor, target: Tensor) -> Tensor:
        """Return the negative log-likelihood of independent pixels."""
        return F.binary_cross_entropy_with_logits(decoded, target, reduction="none").sum((1, 2, 3))

    @staticmethod
    def frames(decoded: Tensor) -> Tensor:
        """Return the likelier value of each pixel."""
        return ((decoded > 0) * 255).to(torch.uint8).permute(0, 2, 3, 1)


IMAGES: dict[str, type[StridedImages] | type[SmallImages]] = {"strided": StridedImages, "small": SmallImages}
"""Networks with an `encoder` of frames in 0 to 1, (N, C, H, W) -> (N, latent), and a `decoder` back.

`compare` returns the loss (N,) of decoder output, `frames` converts it to frames uint8 (N, H, W, C).
"""
