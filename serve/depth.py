"""How many loops a request may ask for: a number, or an exit rule as a JSON object."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loopwm.core import Convergence, CumulativeGate, ExitRule, Fixed, Gate
from loopwm.text.format import FormatError
from serve.body import Body


class GateBody(Body):
    """Leaves the loop where g^(t) > tau."""

    rule: Literal["gate"]
    tau: float
    limit: int

    def made(self) -> ExitRule:
        return Gate(self.tau, self.limit)


class CumulativeBody(Body):
    """Leaves where the probability of having left reaches q."""

    rule: Literal["cumulative"]
    q: float
    limit: int

    def made(self) -> ExitRule:
        return CumulativeGate(self.q, self.limit)


class ConvergenceBody(Body):
    """Leaves where the second difference of the state is below eps of its norm."""

    rule: Literal["convergence"]
    eps: float
    limit: int

    def made(self) -> ExitRule:
        return Convergence(self.eps, self.limit)


RuleBody = Annotated[GateBody | CumulativeBody | ConvergenceBody, Field(discriminator="rule")]
DepthBody = int | RuleBody


def rule_of(body: DepthBody | None) -> ExitRule | None:
    """None where none is asked for. Raises FormatError for a rule with impossible numbers."""
    if body is None:
        return None
    try:
        return Fixed(body) if isinstance(body, int) else body.made()
    except ValueError as error:
        raise FormatError("depth", str(error)) from error
