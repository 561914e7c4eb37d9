"""Record an episode of a trained agent, for filmstrips and films."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.pixels.playing import load_agent, read_config
from loopwm.pixel.gym import real_environments
from loopwm.pixel.imagined import EnvState, rollout
from loopwm.records.frames import FrameEpisode


def record_episode(folder: Path, steps: int, seed: int) -> FrameEpisode:
    """Return the longest episode that begins within `steps` steps of the agent's play, as far as recorded.

    Raises InputError for a run that has not saved an agent.
    """
    config = read_config(folder)
    env, space = real_environments(config.real.environment, config.real.count)
    player = load_agent(folder, space, config).player(config.real.count, seed)
    s = rollout(env, player, steps, EnvState.reset(env, seed)).segments
    starts = [(row, int(start)) for row in range(len(s.first)) for start in np.flatnonzero(s.first[row])]
    lengths = [_length(s.terminated[row, start:] | s.truncated[row, start:]) for row, start in starts]
    row, start = starts[int(np.argmax(lengths))]
    here = row, slice(start, start + max(lengths))
    obs = np.concatenate((s.obs[here], s.next_obs[here][-1:]))
    return FrameEpisode(
        space, obs, s.action[here], s.reward[here], s.terminated[here], s.truncated[here], seed, "agent"
    )


def _length(over: NDArray[np.bool_]) -> int:
    """Return the number of steps up to the first end, or of all."""
    return int(over.argmax()) + 1 if over.any() else len(over)
