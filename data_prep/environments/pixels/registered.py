"""Register the simulators of frames with Gymnasium, for callers that must not import this package:

gymnasium.make_vec("data_prep.environments.pixels.registered:loopwm/Frames-v0", num_envs=8, name="minatar/breakout")
"""

from __future__ import annotations

import gymnasium

MAKERS = "data_prep.environments.pixels.by_name"
gymnasium.register(
    "loopwm/Frames-v0",
    entry_point=f"{MAKERS}:make_frame_environment",
    vector_entry_point=f"{MAKERS}:make_frame_vector",
    # FrameEnvironment checks actions itself, so Gymnasium's checker would only cost time at each step.
    order_enforce=False,
    disable_env_checker=True,
)
