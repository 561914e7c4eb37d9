"""World log: the text of a world session. KV caches are derived from it and may be evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from loopwm.core import ExitRule, make_rule, name_of
from loopwm.records.template import Context, Transition
from loopwm.worlds.protocol import longer

Json = dict[str, Any]


@dataclass(frozen=True)
class WorldLog:
    """Text and settings of a world.

    context: real observations, cut to the context limit.
    depth: exit rule of every forward.
    actions: imagined actions since the last real observation.
    steps_cut: oldest steps, dropped from the context.
    """

    context: Context
    depth: ExitRule
    actions: tuple[str, ...] = ()
    steps_cut: int = 0

    @property
    def size(self) -> int:
        """Bytes of text."""
        context = self.context
        parts = (context.goal, context.observation, context.look, context.inventory, context.hidden_state)
        steps = (text for step in context.history for text in (step.action, step.observation))
        return sum(len(text.encode()) for text in (*parts, *steps, *self.actions) if text is not None)

    def with_actions(self, actions: Sequence[str]) -> WorldLog:
        """Return the log after imagined actions."""
        return replace(self, actions=(*self.actions, *actions))

    def with_observation(self, action: str, observation: str) -> WorldLog:
        """Return the log after a real step, without imagined actions. It may exceed the context limit."""
        return replace(self, context=longer(self.context, action, observation), actions=())

    def json(self) -> Json:
        """Return the fields of a request that creates the world."""
        context = asdict(self.context)
        rule = {"rule": name_of(self.depth), **vars(self.depth)}
        depth = self.depth.limit if rule["rule"] == "fixed" else rule
        fields = {**context, "history": list(context["history"]), "depth": depth, "actions": list(self.actions)}
        return {**fields, "steps_cut": self.steps_cut}


def read_log(fields: Mapping[str, Any]) -> WorldLog:
    """Parse the result of `WorldLog.json`."""
    history = tuple(Transition(**step) for step in fields["history"])
    texts = {name: fields[name] for name in ("goal", "observation", "look", "inventory", "hidden_state")}
    context = Context(history=history, **texts)
    depth = fields["depth"]
    rule: Json = {"rule": "fixed", "loops": depth} if isinstance(depth, int) else dict(depth)
    return WorldLog(context, make_rule(rule.pop("rule"), rule), tuple(fields["actions"]), fields["steps_cut"])
