"""Fixtures of the product that studies and measurements are tested with."""

from __future__ import annotations

from tests.eval.conftest import checkpoint, make_window, suite_path, write_suite

__all__ = ["checkpoint", "make_window", "suite_path", "write_suite"]
