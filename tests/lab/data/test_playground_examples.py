"""The playground's examples."""

from __future__ import annotations

from pathlib import Path

from lab.data import playground_examples
from serve.play import EXAMPLES

ROOT = Path(__file__).parents[3]
SUITES = [str(ROOT / f"eval/suites/{name}-500.jsonl.gz") for name in ("scienceworld", "alfworld")]


def test_playground_examples_equal_the_suites_windows(tmp_path: Path) -> None:
    out = tmp_path / "examples.json"
    assert playground_examples.main([*SUITES, "--out", str(out)]) == 0
    assert out.read_bytes() == EXAMPLES.read_bytes()
