"""Environments for agents whose step is the world model."""

from loopwm.envs.text import ImaginedTextEnv, read_starts
from loopwm.envs.worlds import HttpWorlds, Imagined, LocalWorlds, Worlds

__all__ = ["HttpWorlds", "Imagined", "ImaginedTextEnv", "LocalWorlds", "Worlds", "read_starts"]
