"""Which version of the project made something."""

from __future__ import annotations

import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def checkout() -> dict[str, str | bool]:
    """Commit and whether there are changes to it; nothing where the package does not run from a git checkout."""
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
