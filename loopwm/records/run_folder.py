"""Run folder of every run: config.yaml, provenance.json, metrics.jsonl and checkpoints.

All files appear complete or not at all, so that a run can be killed at any moment and resumes from its newest
checkpoint.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from loopwm.records.errors import InputError
from loopwm.records.files import publish, read_json, write_atomic, write_json, writing
from loopwm.records.provenance import provenance

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class RunFolder:
    """Files of a run. With several processes, only the first calls methods that write.

    counted: number of its checkpoints and metrics, `step` or `iteration`. keep: newest checkpoints to keep.
    """

    path: Path
    counted: str
    keep: int

    def check(self, config: DataclassInstance) -> None:
        """Raise InputError for a folder of a run with another configuration."""
        file = self.path / "config.yaml"
        if file.exists() and file.read_text(encoding="utf-8") != _as_yaml(config):
            raise InputError(f"{file}: the run folder belongs to another configuration")

    def claim(self, config: DataclassInstance, provenance: Mapping[str, Any]) -> None:
        """Write configuration and provenance unless the folder has them."""
        if not (self.path / "config.yaml").exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "provenance.json", provenance)
            write_atomic(self.path / "config.yaml", _as_yaml(config))

    def provenance(self) -> dict[str, Any]:
        """Return what `claim` wrote, empty for a folder that no run has claimed."""
        path = self.path / "provenance.json"
        return dict(read_json(path)) if path.exists() else {}

    def log(self, number: int, record: Mapping[str, Any]) -> None:
        """Append a line of metrics."""
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({self.counted: number, **record}) + "\n")

    def go_on_from(self, number: int) -> None:
        """Drop metrics after this number, and unfinished checkpoints."""
        for torn in (self.path / "checkpoints").glob("tmp-*"):
            shutil.rmtree(torn)
        path = self.path / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            write_atomic(path, "".join(line + "\n" for line in lines if self._number_of(line) <= number))

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, the newest last."""
        return sorted((self.path / "checkpoints").glob(f"{self.counted}-????????"))

    def has(self, number: int) -> bool:
        return self._checkpoint(number).exists()

    def begin_checkpoint(self, number: int) -> Path:
        """Return the temporary folder to write the checkpoint to, inside `files.writing`."""
        return self._checkpoint(number).with_name(f"tmp-{self._checkpoint(number).name}")

    def finish_checkpoint(self, number: int) -> None:
        """Publish the checkpoint and delete old ones."""
        publish(self.begin_checkpoint(number), self._checkpoint(number))
        for old in self.checkpoints()[: -self.keep]:
            shutil.rmtree(old)

    def _checkpoint(self, number: int) -> Path:
        return self.path / "checkpoints" / f"{self.counted}-{number:08d}"

    def _number_of(self, line: str) -> float:
        """Return the step of a line of metrics; infinity for a torn one, which a kill leaves."""
        try:
            return float(json.loads(line)[self.counted])
        except (json.JSONDecodeError, KeyError):
            return float("inf")


def where_from(seed: int, processes: int) -> dict[str, Any]:
    """Return the provenance of a run of any system."""
    machine = platform.processor() or platform.machine()
    return {**provenance("loopwm.training"), "machine": machine, "seed": seed, "processes": processes}


def _as_yaml(config: DataclassInstance) -> str:
    return yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False)
