"""Where results come from: commit, versions, command."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("bm25s", "httpx", "loopwm", "numpy", "sacrebleu", "torch", "transformers")


def provenance() -> dict[str, Any]:
    """Versions of what is loaded, the command line, and the commit if the package runs from a git checkout."""
    loaded = (name for name in _PACKAGES if name in sys.modules)
    versions = {name: version for name in loaded if (version := _version(name)) is not None}
    return {
        "command": shlex.join(["python", "-m", "eval", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **versions},
        **_checkout(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _checkout() -> dict[str, str | bool]:
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != _ROOT:
        return {}
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {} if commit is None else {"commit": commit, "uncommitted_changes": bool(changes)}


def _git(*arguments: str) -> str | None:
    """What git prints, or None where there is no git, no repository or no commit."""
    try:
        result = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
