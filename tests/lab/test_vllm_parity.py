"""The shipped checkpoint answers windows of both worlds alike in the service and in vLLM, whatever vLLM's scheduling.

A small version of `lab.benchmarks.vllm_parity`, which compares 500 windows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.benchmarks import vllm_parity
from lab.benchmarks.vllm_parity import Answer, compare, passes
from loopwm.records.files import PACKAGED

WINDOWS = 8


@pytest.mark.vllm
def test_shipped_checkpoint_answers_alike_in_every_arm(tmp_path: Path) -> None:
    """Preemptions are rare: four of a hundred texts."""
    lines: list[str] = []
    for windows, arms in ((WINDOWS, ["plain", "prefix", "chunked"]), (4 * WINDOWS, ["preempted"])):
        assert vllm_parity.report(PACKAGED, windows, tmp_path / arms[0], arms, lines.append), lines
    assert len(lines) == len(vllm_parity.ARMS)


def test_texts_that_differ_are_compared_where_they_first_do() -> None:
    ours = {"a": Answer([1, 2, 3], "x", [3.0, 2.0, 1.0]), "b": Answer([1], "y", [3.0]), "c": Answer([4], "z", [1.0])}
    theirs = {"a": Answer([1, 5], "v", [3.0, 9.0]), "b": Answer([1, 2], "w", [3.0, 5e-5]), "c": ours["c"]}
    differences = compare(ours, theirs)
    assert [(each.window, each.gap) for each in differences] == [("a", 2.0), ("b", 5e-5)]


def test_cut_prompts_are_those_longer_than_a_pass(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO Chunked prefill is enabled with max_num_batched_tokens=3.\n")
    assert vllm_parity.cut_prompts({"a": [1] * 4, "b": [1] * 3}, log) == 1


@pytest.mark.parametrize(("gap", "texts", "good"), [(9e-5, 100, True), (9e-5, 99, False), (2e-4, 100, False)])
def test_few_differences_between_equals_pass(gap: float, texts: int, good: bool) -> None:
    ours, theirs = {"a": Answer([1], "x", [gap])}, {"a": Answer([2], "y", [1.0])}
    assert passes(compare(ours, theirs), texts) is good
