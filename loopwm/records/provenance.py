"""Provenance: the project's commit, the versions of packages, the command."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("accelerate", "bm25s", "httpx", "loopwm", "numpy", "sacrebleu", "torch", "transformers")


def provenance(module: str) -> dict[str, Any]:
    """Return the command line of `python -m MODULE`, versions of loaded packages, and the commit if there is one."""
    loaded = (name for name in _PACKAGES if name in sys.modules)
    versions = {}
    for name in loaded:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **versions},
        **checkout(),
    }


def checkout() -> dict[str, str | bool]:
    """Return the commit and whether it has changes; empty if the package does not run from a git checkout."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != _ROOT:
        return {}
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {} if commit is None else {"commit": commit, "uncommitted_changes": bool(changes)}


def _git(*arguments: str) -> str | None:
    """Return git's output, or None without git, repository or commit."""
    # Without its lock, which would stay in the repository if this process is killed or the disk is full.
    command = ["git", "--no-optional-locks", "-C", str(_ROOT), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
