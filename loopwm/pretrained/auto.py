"""Entry point of the Auto classes with `trust_remote_code=True`, copied into every checkpoint folder.

The code itself is the installed package's: `pip install loopwm`.
"""

from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM, LoopWMModel

__all__ = ["LoopWMConfig", "LoopWMForCausalLM", "LoopWMModel"]
