"""Transitions per second of one core: the collector against the `scienceworld` package's own `step()` loop.

    python -m lab.benchmarks.collect_scienceworld --steps 200

Both play the same actions of gold paths, and both record observation, score, look and inventory of every step. They
alternate, so that other load slows both alike.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing

from scienceworld import ScienceWorldEnv

from data_prep.environments.scienceworld.environment import ScienceWorld

TASKS = ("boil", "find-plant", "grow-plant", "inclined-plane-determine-angle", "test-conductivity")


def play_package(env: ScienceWorldEnv, task: str, actions: list[str]) -> float:
    """Return seconds of the package's loop, loading excluded."""
    env.load(task, 0, "")
    env.reset()
    start = time.perf_counter()
    for action in actions:
        _, _, _, info = env.step(action)
        assert info.keys() >= {"score", "look", "inv"}
    return time.perf_counter() - start


def play_ours(env: ScienceWorld, task: str, actions: list[str]) -> float:
    """Return seconds of the collector's steps, loading excluded."""
    env.reset(task, 0)
    start = time.perf_counter()
    for action in actions:
        env.step(action)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="actions of each task, at most")
    steps = parser.parse_args().steps
    package, count, seconds = ScienceWorldEnv(), 0, [0.0, 0.0]
    with closing(ScienceWorld()) as ours:
        for task in TASKS:
            actions = ours.gold_actions(task, 0)[:steps]
            count += len(actions)
            seconds[0] += play_package(package, task, actions)
            seconds[1] += play_ours(ours, task, actions)
            print(f"{task}: {len(actions)} actions")
    package.close()
    rates = [count / spent for spent in seconds]
    print(f"package {rates[0]:.1f} transitions/s, collector {rates[1]:.1f}, ratio {rates[1] / rates[0]:.1f}")


if __name__ == "__main__":
    main()
