"""Copied into every checkpoint folder, so that the Auto classes find the model by `trust_remote_code=True`.

The code itself is the installed package's: `pip install loopwm`.
"""

from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM, LoopWMModel

__all__ = ["LoopWMConfig", "LoopWMForCausalLM", "LoopWMModel"]
