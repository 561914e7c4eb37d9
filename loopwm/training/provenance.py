"""Where a run comes from: commit, versions, seeds, data."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from loopwm.text.tokenizer import tokenizer_hash
from loopwm.training.config import TrainingConfig


def provenance(config: TrainingConfig, processes: int) -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "accelerate", "numpy")}
    folders = (*config.data.train, *config.data.dev)
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "versions": versions,
        "seed": config.run.seed,
        "processes": processes,
        "tokenizer_hash": tokenizer_hash(),
        "data": {folder: json.loads((Path(folder) / "index.json").read_text())["shards"] for folder in folders},
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
