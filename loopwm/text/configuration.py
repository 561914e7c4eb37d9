"""Old name of `loopwm.text.model.configuration`, which `auto.py` in checkpoints of version 0.1 imports."""

from loopwm.text.model.configuration import LoopWMConfig

__all__ = ["LoopWMConfig"]
