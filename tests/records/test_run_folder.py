from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopwm.records.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of three logged steps, of which it keeps two checkpoints."""
    folder = RunFolder(tmp_path, "step", 2)
    for step in (1, 2, 3):
        folder.log(step, {"loss": 0.5})
        folder.begin_checkpoint(step).mkdir(parents=True)
        folder.finish_checkpoint(step)
    return folder


def logged(run: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("torn", [b'{"step": 1, "lo', b"\0\0\0\0", b'{"loss": 1}\n', b'"\xff'])
def test_resume_drops_later_and_torn_metrics(run: RunFolder, torn: bytes) -> None:
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    run.go_on_from(2)
    assert logged(run) == [1, 2]
    run.log(3, {"loss": 0.1})
    assert logged(run) == [1, 2, 3]


def test_resume_deletes_unfinished_checkpoints(run: RunFolder) -> None:
    run.begin_checkpoint(4).mkdir()
    run.go_on_from(3)
    assert [path.name for path in (run.path / "checkpoints").iterdir() if path not in run.checkpoints()] == []


def test_only_the_newest_checkpoints_stay(run: RunFolder) -> None:
    assert [path.name for path in run.checkpoints()] == ["step-00000002", "step-00000003"]
