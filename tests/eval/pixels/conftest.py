"""Recorded play of the blocks."""

from __future__ import annotations

from tests.pixel.conftest import frames, twisted_config

__all__ = ["frames", "twisted_config"]
