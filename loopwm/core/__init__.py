"""The looped transformer core: tensors only. It knows neither text nor pixels nor files."""

from loopwm.core.block import Attend, AttentionInputs, causal_attention, prefix_attention, rotary_angles
from loopwm.core.depth import DepthPlan
from loopwm.core.exit_rules import (
    RULES,
    Convergence,
    ExitGate,
    ExitRule,
    Fixed,
    Gate,
    as_rule,
    format_rule,
    make_rule,
    name_of,
    numbers_of,
    parse_rule,
)
from loopwm.core.kv_cache import KVCache, RaggedBatch, allocated_bytes
from loopwm.core.looped import CoreConfig, CoreOutput, LoopedCore
from loopwm.runtime import attention_products, quick_products

__all__ = [
    "RULES",
    "Attend",
    "AttentionInputs",
    "Convergence",
    "CoreConfig",
    "CoreOutput",
    "DepthPlan",
    "ExitGate",
    "ExitRule",
    "Fixed",
    "Gate",
    "KVCache",
    "LoopedCore",
    "RaggedBatch",
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
