"""What a kept world is: its text. Keys and values are made of it, and are no more than its cache."""

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
    """context: what was really seen, cut to the context limit; steps_cut: steps it has lost. actions: imagined since.
    depth: the rule of every pass."""

    context: Context
    depth: ExitRule
    actions: tuple[str, ...] = ()
    steps_cut: int = 0

    @property
    def size(self) -> int:
        """Bytes of its text."""
        context = self.context
        told = (context.goal, context.observation, context.look, context.inventory, context.hidden_state)
        steps = (text for step in context.history for text in (step.action, step.observation))
        return sum(len(text.encode()) for text in (*told, *steps, *self.actions) if text is not None)

    def taken(self, actions: Sequence[str]) -> WorldLog:
        """After actions that are imagined."""
        return replace(self, actions=(*self.actions, *actions))

    def seen(self, action: str, observation: str) -> WorldLog:
        """After what really happened: what was imagined is dropped. It may be too long now."""
        return replace(self, context=longer(self.context, action, observation), actions=())

    def json(self) -> Json:
        """As a request for such a world has it."""
        context = asdict(self.context)
        rule = {"rule": name_of(self.depth), **vars(self.depth)}
        depth = self.depth.limit if rule["rule"] == "fixed" else rule
        told = {**context, "history": list(context["history"]), "depth": depth, "actions": list(self.actions)}
        return {**told, "steps_cut": self.steps_cut}


def read_log(told: Mapping[str, Any]) -> WorldLog:
    """Of what `WorldLog.json` made."""
    history = tuple(Transition(**step) for step in told["history"])
    context = Context(told["goal"], told["observation"], history, told["look"], told["inventory"], told["hidden_state"])
    depth = told["depth"]
    rule: Json = {"rule": "fixed", "loops": depth} if isinstance(depth, int) else dict(depth)
    return WorldLog(context, make_rule(rule.pop("rule"), rule), tuple(told["actions"]), told["steps_cut"])
