"""Old name of `loopwm.text.model.modeling`, which `auto.py` in checkpoints of version 0.1 imports."""

from loopwm.text.model.modeling import LoopWMForCausalLM, LoopWMModel

__all__ = ["LoopWMForCausalLM", "LoopWMModel"]
