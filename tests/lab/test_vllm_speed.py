"""Requests per second beside vLLM's."""

from __future__ import annotations

from lab.benchmarks.vllm_speed import compare


def test_lines_hold_both_rates_and_what_differs() -> None:
    ours = {"rates": {"new": {"8": 3.0}, "again": {"8": 6.0}}, "texts": ["a", "b", "c"]}
    theirs = {"rates": {"new": {"8": 2.0}, "again": {"8": 8.0}}, "texts": ["a", "x", "c"]}
    assert compare(ours, theirs) == [
        "new, 8 at once: 3.00 requests/s, vLLM 2.00, ratio 1.50",
        "again, 8 at once: 6.00 requests/s, vLLM 8.00, ratio 0.75",
        "1 of 3 texts differ",
    ]
