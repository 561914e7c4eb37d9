"""Training program of all systems; run it with `accelerate launch -m loopwm.training`."""
