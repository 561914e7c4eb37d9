"""The looped transformer core: tensors only. It knows neither text nor pixels nor files."""

from loopwm.core.block import Attend, AttentionInputs, SeesItself, causal_attention, prefix_attention, rotary_angles
from loopwm.core.buffers import allocated_bytes
from loopwm.core.depth import DepthPlan
from loopwm.core.halting import (
    RULES,
    Convergence,
    CumulativeGate,
    ExitGate,
    ExitRule,
    Fixed,
    Gate,
    RandomExit,
    Trace,
    as_rule,
    format_rule,
    make_rule,
    name_of,
    numbers_of,
    parse_rule,
)
from loopwm.core.looped import CoreConfig, CoreOutput, LoopedCore
from loopwm.core.shared_state import SharedState
from loopwm.core.state import CoreState
from loopwm.core.state_group import StateGroup
from loopwm.machine import attention_products, quick_products

__all__ = [
    "RULES",
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
    "RandomExit",
    "SeesItself",
    "SharedState",
    "StateGroup",
    "Trace",
    "allocated_bytes",
    "as_rule",
    "attention_products",
    "causal_attention",
    "format_rule",
    "make_rule",
    "name_of",
    "numbers_of",
    "parse_rule",
    "prefix_attention",
    "quick_products",
    "rotary_angles",
]
