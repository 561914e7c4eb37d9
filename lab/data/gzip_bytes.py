"""Gzip files that depend on their content only."""

from __future__ import annotations

import gzip


def pack_gzip(content: str) -> bytes:
    """Compress to bytes without a time or a file name."""
    return gzip.compress(content.encode(), 9, mtime=0)
