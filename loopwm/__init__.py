"""Looped transformer world models of text and pixel environments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopwm.worlds.local import LocalWorlds

__version__ = "0.2.0"


def load(checkpoint: str | Path = "pretrained", device: str = "auto", memory: Sequence[str | Path] = ()) -> LocalWorlds:
    """Load a checkpoint as worlds to act in.

    Args:
        checkpoint: folder of a checkpoint, or `pretrained` for the one that comes with the package.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        memory: files or folders of train episodes to recall outcomes from (`loopwm.text.memory`).

    Returns:
        Worlds that `begin` with contexts, `step` with actions and `observe` what really happened.

    Raises loopwm.records.errors.InputError for a folder that is no checkpoint, `cuda` without a GPU, or no episodes.
    """
    from loopwm.records.files import PACKAGED
    from loopwm.runtime import use_device  # imports torch, which takes seconds
    from loopwm.text.memory import Memory
    from loopwm.text.world import WorldModel
    from loopwm.worlds.local import LocalWorlds

    folder = PACKAGED if checkpoint == "pretrained" else Path(checkpoint)
    model = WorldModel.from_pretrained(folder, use_device(device, "device"))
    return LocalWorlds(model, memory=Memory.load([*map(Path, memory)]) if memory else None)
