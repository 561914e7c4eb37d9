"""Collect frames by a policy without observations: one file an episode.

Split, seed and i alone decide episode i, and files are written atomically: an interrupted run that is started again
yields the same files, and a run for more episodes continues a shorter one. `plan.json` holds the options; a run with
others refuses the folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from data_prep.environments.pixels.by_name import make_frame_environment
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, write_json
from loopwm.records.frames import FrameEpisode, FrameSpace, count_steps, write_episode

if TYPE_CHECKING:
    from data_prep.environments.pixels.base import FrameEnvironment

PLAN = "plan.json"
SPLITS = ("train", "dev", "test")
RANGE = 2**20
"""Number of episodes of a seed, and of seeds of a split: their seeds differ, of which simulators draw 31 bits."""


@dataclass(frozen=True)
class FramePlan:
    """Options of a collection of frames. max_steps: truncates episodes; None: only the environment does.

    Raises InputError for an unknown split, or a seed or limit out of range.
    """

    env: str
    split: str
    seed: int
    max_steps: int | None
    policy: str = "random"

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise InputError(f"--split: must be one of {', '.join(SPLITS)}, got {self.split!r}")
        if not 0 <= self.seed < RANGE:
            raise InputError(f"--seed: must be 0 to {RANGE - 1}, got {self.seed}")
        if self.policy not in POLICIES:
            raise InputError(f"--policy: must be one of {', '.join(POLICIES)} for frames, got {self.policy!r}")

    def episode_seed(self, index: int) -> int:
        return (SPLITS.index(self.split) * RANGE + self.seed) * RANGE + index


def at_random(actions: int, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield int(rng.integers(actions))


POLICIES = {"random": at_random}
"""Policies by name: each yields actions, given their number. `lab.data.collect_choices` adds one."""


def play_episode(env: FrameEnvironment, seed: int, max_steps: int | None, policy: str = "random") -> FrameEpisode:
    """Play one episode, decided by the seed."""
    rng = np.random.default_rng([seed, 1])  # not the stream of the environment
    chosen = POLICIES[policy](env.space.actions, rng)
    frame, info = env.reset(seed=seed)
    frames, extras, actions, results = [frame], [info], [], []
    over = False
    while not over:
        actions.append(next(chosen))
        frame, reward, terminated, truncated, info = env.step(np.int64(actions[-1]))
        truncated = truncated or (not terminated and len(actions) == max_steps)
        frames.append(frame)
        extras.append(info)
        results.append((reward, terminated, truncated))
        over = terminated or truncated
    rewards, terminations, truncations = zip(*results, strict=True)
    return FrameEpisode(
        space=env.space,
        obs=np.stack(frames),
        action=np.array(actions, np.int64),
        reward=np.array(rewards, np.float32),
        terminated=np.array(terminations),
        truncated=np.array(truncations),
        seed=seed,
        policy=policy,
        extras={name: np.stack([row[name] for row in extras]) for name in info},
    )


def collect_frames(plan: FramePlan, out: Path, enough: Callable[[int, int], bool], bar: tqdm[Any]) -> tuple[int, int]:
    """Play episodes until `enough(episodes, transitions)`; the bar counts transitions.

    Returns episodes and transitions in the folder, as far as requested.
    """
    env = make_frame_environment(plan.env)
    try:
        _begin(plan, env.space, out)
        episodes = transitions = 0
        while not enough(episodes, transitions):
            if episodes == RANGE:
                raise InputError(f"--seed: all {RANGE} episodes of seed {plan.seed} exist")
            path = out / f"{episodes:07d}.npz"
            if path.exists():
                steps = count_steps(path)
                bar.initial += steps  # existing episodes do not count for the rate
            else:
                episode = play_episode(env, plan.episode_seed(episodes), plan.max_steps, plan.policy)
                write_episode(path, episode)
                steps = len(episode)
            episodes, transitions = episodes + 1, transitions + steps
            bar.update(steps)
            bar.set_postfix_str(f"{episodes} episodes")
        return episodes, transitions
    finally:
        env.close()


def _begin(plan: FramePlan, space: FrameSpace, out: Path) -> None:
    """Write the plan of a new folder. Raises InputError if the folder has another."""
    path = out / PLAN
    wanted: dict[str, Any] = json.loads(json.dumps({**asdict(plan), "space": asdict(space)}))
    if path.is_file():
        saved = {"policy": "random"} | read_json(path)  # older plans name no policy
        for name, value in wanted.items():
            if saved.get(name) != value:
                raise InputError(f"{path}: {name}: must be {saved.get(name)!r} as in the folder, got {value!r}")
        return
    write_json(path, wanted)


def run_frames(plan: FramePlan, out: Path, episodes: int | None, steps: int | None) -> None:
    """Play until there are `episodes` and `steps`, at least one of which is given."""

    def enough(played: int, transitions: int) -> bool:
        return (episodes is None or played >= episodes) and (steps is None or transitions >= steps)

    started = time.monotonic()
    with tqdm(total=steps, unit="transition", smoothing=0) as bar:
        played, transitions = collect_frames(plan, out, enough, bar)
        new = transitions - bar.initial
    seconds = time.monotonic() - started
    print(
        f"{out}: {played} episodes, {transitions} transitions, {new} of them in {seconds:.0f} s ({new / seconds:.1f}/s)"
    )
