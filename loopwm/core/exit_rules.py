"""Exit gate and exit rules: when a pass leaves the loop.

    g^(t) = sigmoid(w . h^(t) + b)                       LoopWM, equation 12

A pass decides once per row after every loop, from the mean state over its last columns: the M state slots of a
transition, the one column of a decoded token. Rules are small frozen objects with one interface, `ExitRule`; an int
in their place means `Fixed`. To add a rule, write a frozen dataclass here under `exit_rule(name)`: command lines, HTTP
and studies use that name.

Shape suffixes: B rows, L columns, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar, get_type_hints, runtime_checkable

import torch
from torch import Tensor, nn


class ExitGate(nn.Module):
    """Compute the logit of g^(t), a linear layer on h^(t) (LoopWM, equation 12). The gate starts at 0.5."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, h: Tensor) -> Tensor:
        """Map h (..., D) to logits (...) in float32, also under autocast: thresholds are compared with them."""
        return (h.float() * self.linear.weight[0].float()).sum(-1) + self.linear.bias.float()


@dataclass(frozen=True)
class LoopView:
    """Inputs of an exit decision after loop t >= 1 of a pass.

    states: (B, D) each, pooled h^(0) .. h^(t). gates: (B, t) g^(1) .. g^(t), only for rules that need the gate.
    """

    loop: int
    states: Sequence[Tensor]
    gates: Tensor | None


@runtime_checkable
class ExitRule(Protocol):
    """Rule for the rows that exit the loop. `limit` is the loop after which every row has exited."""

    needs_gate: ClassVar[bool]
    depends_on_batch: ClassVar[bool]
    """True if a row's exits depend on its place in the batch; such a rule cannot be used with continuous batching."""

    @property
    def limit(self) -> int: ...

    def for_pass(self, index: int, rows: Sequence[int]) -> ExitRule:
        """Return the rule for these rows in the index-th pass (step or token) of a rollout."""

    def exits(self, view: LoopView) -> Tensor:
        """Return (B,) bool: rows whose state after this loop is their last. Also called for rows that have exited."""


RULES: dict[str, type[Any]] = {}
"""Exit rules by name."""

_Rule = TypeVar("_Rule", bound=type)


def exit_rule(name: str) -> Callable[[_Rule], _Rule]:
    """Register a frozen dataclass that implements `ExitRule`."""

    def register(rule: _Rule) -> _Rule:
        RULES[name] = rule
        return rule

    return register


class SameInEveryPass:
    """Defaults of most rules: no gate, each row by itself, the same in every pass."""

    needs_gate: ClassVar[bool] = False
    depends_on_batch: ClassVar[bool] = False

    def for_pass(self, index: int, rows: Sequence[int]) -> Self:
        return self


@exit_rule("fixed")
@dataclass(frozen=True)
class Fixed(SameInEveryPass):
    """Exit after `loops` loops."""

    loops: int

    @property
    def limit(self) -> int:
        return self.loops

    def exits(self, view: LoopView) -> Tensor:
        state = view.states[-1]
        # A tensor, although it is the same for all rows: the loop combines it with rows that exited.
        return torch.full((len(state),), view.loop >= self.loops, device=state.device)


@exit_rule("gate")
@dataclass(frozen=True)
class Gate(SameInEveryPass):
    """Exit if g^(t) > tau (LoopWM, section 3.4). Raises ValueError if tau is not inside (0, 1)."""

    tau: float
    limit: int
    needs_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            raise ValueError(f"tau: must be inside (0, 1), got {self.tau}")

    def exits(self, view: LoopView) -> Tensor:
        if view.gates is None:
            raise ValueError("depth: the rule needs an exit gate")
        return view.gates[:, -1] > self.tau


@exit_rule("convergence")
@dataclass(frozen=True)
class Convergence(SameInEveryPass):
    """Exit if |h^(t) - 2 h^(t-1) + h^(t-2)| < eps |h^(t)|, t >= 2 (LoopWM, section 3.4, after Pappone et al. 2025).

    The paper prints an absolute bound; this one is relative to |h^(t)|. Raises ValueError if eps is not above zero.
    """

    eps: float
    limit: int

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"eps: must be above 0, got {self.eps}")

    def exits(self, view: LoopView) -> Tensor:
        h = view.states
        if view.loop < 2:
            return torch.zeros(len(h[-1]), dtype=torch.bool, device=h[-1].device)
        # Three states are needed, so the earliest exit is after loop 2.
        second_difference = h[-1] - 2 * h[-2] + h[-3]
        return second_difference.norm(dim=-1) < self.eps * h[-1].norm(dim=-1)


def as_rule(depth: int | ExitRule) -> ExitRule:
    """Return `depth` if it is a rule, `Fixed` if it is a number of loops. Raises ValueError otherwise."""
    if isinstance(depth, int) and not isinstance(depth, bool):
        return Fixed(depth)
    if not isinstance(depth, ExitRule):
        raise ValueError(f"depth: must be a number of loops or an exit rule, got {depth!r}")
    return depth


def numbers_of(name: str) -> dict[str, type]:
    """Return the fields of a rule and their types, int or float; empty if a field has another type."""
    hints = get_type_hints(RULES[name])
    # `get_type_hints`, since annotations are strings under `from __future__ import annotations`.
    kinds = {field.name: hints[field.name] for field in fields(RULES[name])}
    return kinds if set(kinds.values()) <= {int, float} else {}


def name_of(rule: ExitRule) -> str:
    return next(name for name, known in RULES.items() if type(rule) is known)


def make_rule(name: str, values: Mapping[str, Any]) -> ExitRule:
    """Build a rule by name. Raises ValueError for an unknown name, an unknown or missing field, or an invalid value."""
    if name not in RULES:
        raise ValueError(f"rule: must be one of {', '.join(RULES)}, got {name!r}")
    expected = {field.name for field in fields(RULES[name])}
    if wrong := sorted(expected ^ values.keys()):
        raise ValueError(
            f"{wrong[0]}: {'missing' if wrong[0] in expected else 'unknown'}, {name} has {', '.join(sorted(expected))}"
        )
    return RULES[name](**values)


def read_rule(depth: int | Mapping[str, Any]) -> ExitRule:
    """Return the rule of a JSON value: a number of loops, or the fields of a rule and its name. Raises ValueError."""
    if isinstance(depth, int):
        return Fixed(depth)
    return make_rule(depth["rule"], {name: depth[name] for name in depth if name != "rule"})


def parse_rule(text: str) -> ExitRule:
    """Parse a number of loops, or a rule such as `gate:tau=0.5,limit=4`. Raises ValueError naming the fault."""
    if text.isdecimal() and int(text) > 0:
        return Fixed(int(text))
    name, _, arguments = text.partition(":")
    kinds = numbers_of(name) if name in RULES else {}
    if not kinds:
        offered = ", ".join(name for name in RULES if numbers_of(name))
        raise ValueError(f"must be a number of loops or one of {offered}, such as gate:tau=0.5,limit=4, got {text!r}")
    values = dict(item.partition("=")[::2] for item in arguments.split(",") if item)
    try:
        numbers = {field: kinds.get(field, float)(value) for field, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    return make_rule(name, numbers)


def format_rule(rule: ExitRule) -> int | str:
    """Format a rule of numbers for `parse_rule`; `Fixed` becomes its number."""
    if isinstance(rule, Fixed):
        return rule.loops
    return f"{name_of(rule)}:" + ",".join(f"{field.name}={getattr(rule, field.name)!r}" for field in fields(rule))  # type: ignore[arg-type]
