"""Environments for agents whose step is the world model."""

from __future__ import annotations

from loopwm.worlds.gym import ImaginedTextEnv, read_starts
from loopwm.worlds.worlds import HttpWorlds, Imagined, LocalWorlds, Worlds

__all__ = ["HttpWorlds", "Imagined", "ImaginedTextEnv", "LocalWorlds", "Worlds", "read_starts"]
