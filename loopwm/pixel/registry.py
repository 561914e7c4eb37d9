"""Pixel systems and learners by name. No torch: the front door reads it before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from loopwm.records.errors import InputError

SYSTEMS = {
    "edeline": "loopwm.pixel.edeline.system:Edeline",
    "storm": "loopwm.pixel.storm.system:StormSystem",
    "twisted": "loopwm.pixel.twisted.system:TwistedSystem",
}
"""By the name that configurations and checkpoints give: module and class, a `PixelSystem`."""

AGENTS = {f"{name}-agent": name for name in SYSTEMS}
"""Systems by the names of the agents that learn in them."""

LEARNERS = {
    "actor-critic": "loopwm.pixel.agents.actor_critic_learner:ActorCriticAgent",
    "ppo": "loopwm.pixel.agents.ppo_learner:PPOLearner",
}
"""By the configuration's `learner`: module and class, a `Learner`."""


def named(registry: Mapping[str, str], name: str, key: str) -> Any:
    """The class that a registry has by this name. Raises InputError naming the key for one that is not registered."""
    if name not in registry:
        raise InputError(f"{key}: {name!r} is not one of {', '.join(registry)}")
    module, _, attribute = registry[name].partition(":")
    return getattr(import_module(module), attribute)
