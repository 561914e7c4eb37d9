"""When a pass leaves the loop: the exit gate and the exit rules.

    g^(t) = sigmoid(w . h^(t) + b)                       LoopWM, equation 12

A pass decides once for each row, after every loop, from the mean state over its last columns: the M state slots of a
transition, the one column of a decoded token. Rules are small frozen objects with one interface, `ExitRule`; an int
in their place means `Fixed`. A new rule is a frozen dataclass here, named by `exit_rule`: command lines, HTTP, studies
and files of worlds know it by that.

Shape suffixes: B rows, L columns, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar, get_type_hints, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn


class ExitGate(nn.Module):
    """The logit of g^(t) (LoopWM, equation 12): a linear layer on h^(t), which a sigmoid turns into an exit
    probability. Starts at 0.5."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, h: Tensor) -> Tensor:
        """h: (..., D) -> logits (...) in float32, under autocast too: a threshold is compared with them."""
        return (h.float() * self.linear.weight[0].float()).sum(-1) + self.linear.bias.float()


@dataclass(frozen=True)
class LoopView:
    """What a rule sees after loop t >= 1 of a pass.

    states: (B, D) each, pooled h^(0) .. h^(t). gates: (B, t) g^(1) .. g^(t), only for rules that need the gate.
    """

    loop: int
    states: Sequence[Tensor]
    gates: Tensor | None


@runtime_checkable
class ExitRule(Protocol):
    """Decides which rows leave the loop. `limit` is the loop after which every row has left."""

    needs_gate: ClassVar[bool]
    depends_on_batch: ClassVar[bool]
    """Whether a row's exits depend on its place in a batch: such a rule is of no use where others join the batch."""

    @property
    def limit(self) -> int: ...

    def for_pass(self, index: int, rows: Sequence[int]) -> ExitRule:
        """The rule for these rows of a batch in the index-th pass of a rollout (the index-th step, or token)."""

    def exits(self, view: LoopView) -> Tensor:
        """(B,) bool: rows whose state after this loop is their last. Asked of rows that have left, too."""


RULES: dict[str, type[Any]] = {}
"""Exit rules by name."""

_Rule = TypeVar("_Rule", bound=type)


def exit_rule(name: str) -> Callable[[_Rule], _Rule]:
    """Names a frozen dataclass that follows `ExitRule`. Raises TypeError for one that lacks a member."""

    def register(rule: _Rule) -> _Rule:
        for member in ("needs_gate", "depends_on_batch", "for_pass", "exits"):
            if not hasattr(rule, member):
                raise TypeError(f"{rule.__name__}: an exit rule has {member}")
        RULES[name] = rule
        return rule

    return register


class SameInEveryPass:
    """What most rules share: they need no gate, decide for each row by itself, and alike in every pass."""

    needs_gate: ClassVar[bool] = False
    depends_on_batch: ClassVar[bool] = False

    def for_pass(self, index: int, rows: Sequence[int]) -> Self:
        return self


@exit_rule("fixed")
@dataclass(frozen=True)
class Fixed(SameInEveryPass):
    """Every row takes this many loops."""

    loops: int

    @property
    def limit(self) -> int:
        return self.loops

    def exits(self, view: LoopView) -> Tensor:
        state = view.states[-1]
        return torch.full((len(state),), view.loop >= self.loops, device=state.device)


@exit_rule("gate")
@dataclass(frozen=True)
class Gate(SameInEveryPass):
    """Leaves where g^(t) > tau (LoopWM, section 3.4). Raises ValueError if tau is not inside (0, 1)."""

    tau: float
    limit: int
    needs_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _inside_unit("tau", self.tau)

    def exits(self, view: LoopView) -> Tensor:
        return _gates(view)[:, -1] > self.tau


@exit_rule("cumulative")
@dataclass(frozen=True)
class CumulativeGate(SameInEveryPass):
    """Leaves where the probability of having left, 1 - prod_{s<=t}(1 - g^(s)), reaches q (Ouro, section 3.2:
    Q-exit).

    Raises ValueError if q is not inside (0, 1).
    """

    q: float
    limit: int
    needs_gate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _inside_unit("q", self.q)

    def exits(self, view: LoopView) -> Tensor:
        return 1 - (1 - _gates(view)).prod(1) >= self.q


@exit_rule("convergence")
@dataclass(frozen=True)
class Convergence(SameInEveryPass):
    """Leaves where |h^(t) - 2 h^(t-1) + h^(t-2)| < eps |h^(t)|, t >= 2 (LoopWM, section 3.4, after Pappone
    et al. 2025). The paper prints a bound that is not relative to |h^(t)|.

    Raises ValueError if eps is not above zero.
    """

    eps: float
    limit: int

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ValueError(f"eps: {self.eps} is not above zero")

    def exits(self, view: LoopView) -> Tensor:
        h = view.states
        if view.loop < 2:
            return torch.zeros(len(h[-1]), dtype=torch.bool, device=h[-1].device)
        second_difference = h[-1] - 2 * h[-2] + h[-3]
        return second_difference.norm(dim=-1) < self.eps * h[-1].norm(dim=-1)


@exit_rule("trace")
@dataclass(frozen=True)
class Trace:
    """Loops taken before, to be taken again: `loops[row][pass]`.

    After its last number a row leaves after one loop: a finished observation that waits for the others of its batch.
    Raises ValueError for an empty trace or a number below 1.
    """

    loops: tuple[tuple[int, ...], ...]
    needs_gate: ClassVar[bool] = False
    depends_on_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.loops or min((loops for row in self.loops for loops in row), default=0) < 1:
            raise ValueError("loops: a trace holds at least one number of loops, none below 1")

    @property
    def limit(self) -> int:
        return max(loops for row in self.loops for loops in row)

    def for_pass(self, index: int, rows: Sequence[int]) -> Trace:
        """Raises ValueError for a row that the trace does not have."""
        if max(rows) >= len(self.loops):
            raise ValueError(f"loops: the trace has {len(self.loops)} rows, row {max(rows)} is asked for")
        return Trace(tuple(self.loops[row][index : index + 1] or (1,) for row in rows))

    def exits(self, view: LoopView) -> Tensor:
        """Raises ValueError if the batch has another number of rows than the trace."""
        if len(self.loops) != len(view.states[-1]):
            raise ValueError(f"loops: a trace of {len(self.loops)} rows for a batch of {len(view.states[-1])}")
        first = [row[0] for row in self.loops]
        return torch.tensor(first, device=view.states[-1].device) <= view.loop


@exit_rule("random")
@dataclass(frozen=True)
class RandomExit:
    """Leaves after each loop with this probability: the baseline a rule has to beat at equal mean loops.

    Draws depend on (seed, pass, row of the batch) alone, so different batches want different seeds. The mean is
    (1 - (1 - probability)^limit) / probability. Raises ValueError if the probability is not inside (0, 1) or the seed
    below zero.
    """

    probability: float
    limit: int
    seed: int
    needs_gate: ClassVar[bool] = False
    depends_on_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _inside_unit("probability", self.probability)
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed} is below zero")

    def for_pass(self, index: int, rows: Sequence[int]) -> Trace:
        generators = (np.random.default_rng((self.seed, index, row)) for row in rows)
        return Trace(tuple((min(int(rng.geometric(self.probability)), self.limit),) for rng in generators))

    def exits(self, view: LoopView) -> Tensor:
        return self.for_pass(0, range(len(view.states[-1]))).exits(view)


def as_rule(depth: int | ExitRule) -> ExitRule:
    """The rule itself, or `Fixed` for a number of loops. Raises ValueError for anything else."""
    if isinstance(depth, int) and not isinstance(depth, bool):
        return Fixed(depth)
    if not isinstance(depth, ExitRule):
        raise ValueError(f"depth: {depth!r} is neither a number of loops nor an exit rule")
    return depth


def numbers_of(name: str) -> dict[str, type]:
    """Fields of a rule, each int or float; none of a rule that is not made of numbers alone."""
    hints = get_type_hints(RULES[name])
    kinds = {field.name: hints[field.name] for field in fields(RULES[name])}
    return kinds if set(kinds.values()) <= {int, float} else {}


def name_of(rule: ExitRule) -> str:
    return next(name for name, known in RULES.items() if type(rule) is known)


def make_rule(name: str, values: Mapping[str, Any]) -> ExitRule:
    """Raises ValueError for a name that is not known, a field too many or too few, and what the rule refuses."""
    if name not in RULES:
        raise ValueError(f"rule: unknown {name!r}, expected one of {', '.join(RULES)}")
    expected = {field.name for field in fields(RULES[name])}
    if wrong := sorted(expected ^ values.keys()):
        raise ValueError(
            f"{wrong[0]}: {'missing' if wrong[0] in expected else 'unknown'}, {name} has {', '.join(sorted(expected))}"
        )
    rule: ExitRule = RULES[name](**values)
    return rule


def parse_rule(text: str) -> ExitRule:
    """Reads a number of loops, or a rule such as `gate:tau=0.5,limit=4`. Raises ValueError naming what is wrong."""
    if text.isdecimal() and int(text) > 0:
        return Fixed(int(text))
    name, _, given = text.partition(":")
    kinds = numbers_of(name) if name in RULES else {}
    if not kinds:
        offered = ", ".join(name for name in RULES if numbers_of(name))
        raise ValueError(f"{text!r} is neither a number of loops nor one of {offered}, such as gate:tau=0.5,limit=4")
    values = dict(item.partition("=")[::2] for item in given.split(",") if item)
    try:
        numbers = {field: kinds.get(field, float)(value) for field, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    return make_rule(name, numbers)


def format_rule(rule: ExitRule) -> int | str:
    """What `parse_rule` reads as this rule, which is made of numbers; of `Fixed` its number."""
    if isinstance(rule, Fixed):
        return rule.loops
    return f"{name_of(rule)}:" + ",".join(f"{field.name}={getattr(rule, field.name)!r}" for field in fields(rule))  # type: ignore[arg-type]


def _inside_unit(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name}: {value} is not inside (0, 1)")


def _gates(view: LoopView) -> Tensor:
    if view.gates is None:
        raise ValueError("depth: the rule needs an exit gate")
    return view.gates
