"""The training program: one for all systems, run with `accelerate launch -m loopwm.training`."""
