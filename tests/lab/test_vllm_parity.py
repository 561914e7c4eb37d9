"""The shipped checkpoint answers windows of both worlds alike in the service and in vLLM, whatever vLLM's scheduling.

A small version of `lab.benchmarks.vllm_parity`, which compares 500 windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lab.benchmarks import vllm_parity
from lab.benchmarks.vllm_parity import Answer, compare, passes
from loopwm.records.errors import InputError
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


def test_answers_ask_for_missing_ones_of_the_same_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    @contextmanager
    def serving(command: Sequence[str], log: Path) -> Iterator[tuple[httpx.Client, str]]:
        page = httpx.MockTransport(lambda _: httpx.Response(200, text=""))
        yield httpx.Client(base_url="http://service/v1/", transport=page), "model"

    def ask(client: httpx.Client, model: str, end: int, prompt: list[int]) -> Answer:
        asked.append(prompt)
        return Answer(prompt, "text", [1.0])

    monkeypatch.setattr(vllm_parity, "serving", serving)
    monkeypatch.setattr(vllm_parity, "ask", ask)
    file = tmp_path / "plain.json"
    vllm_parity.answers(["serve"], "first", {"a": [1]}, 0, file)
    given, _ = vllm_parity.answers(["serve"], "first", {"a": [1], "b": [2]}, 0, file)
    assert (asked, given["b"].tokens) == ([[1], [2]], [2])
    for command, checkpoint, prompt in (
        (["serve"], "other", [1]),
        (["other"], "first", [1]),
        (["serve"], "first", [3]),
    ):
        with pytest.raises(InputError, match="another checkpoint, command or prompts"):
            vllm_parity.answers(command, checkpoint, {"a": prompt}, 0, file)


@pytest.mark.parametrize(("gap", "texts", "good"), [(9e-5, 100, True), (9e-5, 99, False), (2e-4, 100, False)])
def test_few_differences_between_equals_pass(gap: float, texts: int, good: bool) -> None:
    ours, theirs = {"a": Answer([1], "x", [gap])}, {"a": Answer([2], "y", [1.0])}
    assert passes(compare(ours, theirs), texts) is good
