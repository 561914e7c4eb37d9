"""Registry of pixel systems and learners. Imports no torch, so that commands can read it before they load anything."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from loopwm.records.errors import InputError

SYSTEMS = {
    "edeline": "loopwm.pixel.edeline.system:Edeline",
    "storm": "loopwm.pixel.storm.system:StormSystem",
    "twisted": "loopwm.pixel.twisted.system:TwistedSystem",
}
"""Name in configurations and checkpoints -> module and class of a `PixelSystem`."""

AGENTS = {f"{name}-agent": name for name in SYSTEMS}
"""Agent name -> name of the system that the agent learns in."""

LEARNERS = {
    "actor-critic": "loopwm.pixel.agents.actor_critic_learner:ActorCriticAgent",
    "ppo": "loopwm.pixel.agents.ppo_learner:PPOLearner",
}
"""Value of the key `learner` -> module and class of a `Learner`."""


def named(registry: Mapping[str, str], name: str, key: str) -> Any:
    """Import the class registered under `name`. Raises InputError, naming `key`, if there is none."""
    if name not in registry:
        raise InputError(f"{key}: must be one of {', '.join(registry)}, got {name!r}")
    return resolve_name(registry[name])
