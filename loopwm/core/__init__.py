"""The looped transformer core: tensors only. It knows neither text nor pixels nor files."""

from loopwm.core.block import Attend, AttentionInputs, causal_attention, rotary_angles
from loopwm.core.depth import DepthPlan
from loopwm.core.looped import CoreConfig, CoreOutput, LoopedCore
from loopwm.core.state import CoreState

__all__ = [
    "Attend",
    "AttentionInputs",
    "CoreConfig",
    "CoreOutput",
    "CoreState",
    "DepthPlan",
    "LoopedCore",
    "causal_attention",
    "rotary_angles",
]
