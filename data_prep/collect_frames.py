"""Plays an environment of frames by a policy that looks at nothing and writes one file an episode.

Episode i of a split is decided by split, seed and i alone, and a file appears complete or not at all: a run that was
killed and started again yields the same files, and a run that asks for more goes on where one that asked for less
ended. `plan.json` holds what was asked for; a run with other options refuses the folder.
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
from loopwm.records.files import write_json
from loopwm.records.frames import FrameEpisode, FrameSpace, count_steps, write_episode

if TYPE_CHECKING:
    from data_prep.environments.pixels.base import FrameEnvironment

PLAN = "plan.json"
SPLITS = ("train", "dev", "test")
RANGE = 2**20
"""Episodes a seed has, and seeds a split has: environments are seeded from disjoint ranges."""


@dataclass(frozen=True)
class FramePlan:
    """What is played. max_steps: an episode is truncated after this many actions; None: only where the environment
    does so. Raises InputError for an unknown split or a seed or limit out of range."""

    env: str
    split: str
    seed: int
    max_steps: int | None
    policy: str = "random"

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise InputError(f"--split: unknown {self.split!r}, expected one of {', '.join(SPLITS)}")
        if not 0 <= self.seed < RANGE:
            raise InputError(f"--seed: {self.seed} is not within 0 and {RANGE - 1}")
        if self.policy not in POLICIES:
            raise InputError(f"--policy: {self.policy!r}: frames are played by one of {', '.join(POLICIES)}")
        if self.policy != "random" and not self.env.startswith("minigrid/"):
            raise InputError(f"--policy: {self.policy} plays minigrid, not {self.env}")

    def episode_seed(self, index: int) -> int:
        return (SPLITS.index(self.split) * RANGE + self.seed) * RANGE + index


def at_random(actions: int, rng: np.random.Generator) -> Iterator[int]:
    """Uniformly random actions."""
    while True:
        yield int(rng.integers(actions))


LEFT, RIGHT, FORWARD, STAY = 0, 1, 2, 6
"""Of MiniGrid."""


def look_back(actions: int, rng: np.random.Generator) -> Iterator[int]:
    """Turns one to four times, waits 0 to 16 steps, and again, now and then after a few steps forward: what is out of
    sight comes back into it, sooner or later. For MiniGrid's Memory mazes."""
    while True:
        yield from [int(rng.choice((LEFT, RIGHT)))] * int(rng.integers(1, 5))
        yield from [STAY] * int(rng.integers(17))
        if rng.random() < 0.2:
            yield from [FORWARD] * int(rng.integers(1, 5))


def choose(actions: int, rng: np.random.Generator) -> Iterator[int]:
    """Looks around and waits, one to three times, walks to the end of the corridor, turns left or right and goes on: by
    chance to the object that was seen, or to the other. For MiniGrid's Memory mazes, which begin along the corridor."""
    turned = 0
    for _ in range(int(rng.integers(1, 4))):
        turn, times = (LEFT, RIGHT)[int(rng.integers(2))], int(rng.integers(1, 5))
        yield from [turn] * times
        yield from [STAY] * int(rng.integers(17))
        turned += times if turn == LEFT else -times
    yield from [RIGHT] * (turned % 4)
    yield from [FORWARD] * CORRIDOR
    while True:
        yield int(rng.choice((LEFT, RIGHT)))
        yield FORWARD


CORRIDOR = 8
"""Steps to the end of the longest corridor that is played, S9's: a wall stops those that are too many."""

POLICIES = {"random": at_random, "look-back": look_back, "choose": choose}


def play_episode(env: FrameEnvironment, seed: int, max_steps: int | None, policy: str = "random") -> FrameEpisode:
    """One episode, decided by the seed."""
    rng = np.random.default_rng([seed, 1])
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
    """Plays episodes until `enough(episodes, transitions)`; the bar counts transitions. Returns episodes and
    transitions in the folder, as far as asked for."""
    env = make_frame_environment(plan.env)
    try:
        _begin(plan, env.space, out)
        episodes = transitions = 0
        while not enough(episodes, transitions):
            if episodes == RANGE:
                raise InputError(f"--seed: all {RANGE} episodes of seed {plan.seed} are played")
            path = out / f"{episodes:07d}.npz"
            if path.exists():
                steps = count_steps(path)
                bar.initial += steps  # what was there before does not count for the rate
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
    """Writes the plan of a new folder. Raises InputError if the folder was begun with another."""
    path = out / PLAN
    wanted: dict[str, Any] = json.loads(json.dumps({**asdict(plan), "space": asdict(space)}))
    if path.is_file():
        saved = {"policy": "random"} | json.loads(path.read_bytes())
        for name, value in wanted.items():
            if saved.get(name) != value:
                raise InputError(f"{path}: {name}: must be {saved.get(name)!r} as in the folder, got {value!r}")
        return
    write_json(path, wanted)


def run_frames(plan: FramePlan, out: Path, episodes: int | None, steps: int | None) -> None:
    """Plays until there are `episodes` and `steps`, of which at least one is given."""

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
