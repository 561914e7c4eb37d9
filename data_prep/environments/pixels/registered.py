"""Simulators of frames as Gymnasium environments. Who must not know this package asks Gymnasium for the id alone:

gymnasium.make_vec("data_prep.environments.pixels.registered:loopwm/Frames-v0", num_envs=8, name="minatar/breakout")
"""

from __future__ import annotations

import gymnasium

from data_prep.environments.pixels.by_name import make_frame_environment, make_frame_vector

gymnasium.register(
    "loopwm/Frames-v0",
    entry_point=make_frame_environment,
    vector_entry_point=make_frame_vector,
    # FrameEnvironment checks actions itself; a simulator's frames need no second look at each step.
    order_enforce=False,
    disable_env_checker=True,
)
