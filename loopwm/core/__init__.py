"""The looped transformer core: tensors only. It knows neither text nor pixels nor files."""

from loopwm.core.block import Attend, AttentionInputs, causal_attention, prefix_attention, rotary_angles
from loopwm.core.depth import DepthPlan
from loopwm.core.halting import (
    Convergence,
    CumulativeGate,
    ExitGate,
    ExitRule,
    Fixed,
    Gate,
    RandomExit,
    Trace,
    as_rule,
)
from loopwm.core.looped import CoreConfig, CoreOutput, LoopedCore
from loopwm.core.state import CoreState, Planes, SharedState, new_state
from loopwm.core.state_group import StateGroup
from loopwm.machine import attention_products, quick_products

__all__ = [
    "Attend",
    "AttentionInputs",
    "Convergence",
    "CoreConfig",
    "CoreOutput",
    "CoreState",
    "CumulativeGate",
    "DepthPlan",
    "ExitGate",
    "ExitRule",
    "Fixed",
    "Gate",
    "LoopedCore",
    "Planes",
    "RandomExit",
    "SharedState",
    "StateGroup",
    "Trace",
    "as_rule",
    "attention_products",
    "causal_attention",
    "new_state",
    "prefix_attention",
    "quick_products",
    "rotary_angles",
]
