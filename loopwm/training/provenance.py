"""Where a run comes from, whatever it trains: commit, versions, seed."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance(seed: int, processes: int) -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "accelerate", "numpy")}
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "versions": versions,
        "seed": seed,
        "processes": processes,
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
