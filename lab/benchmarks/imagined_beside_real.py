"""Steps per second of imagined worlds and of the simulator, from one trainer's script.

    python -m serve --model loopwm/pretrained &
    python -m lab.benchmarks.imagined_beside_real --url http://127.0.0.1:8000

All take the same actions: --envs imagined worlds, without --url in this process, one simulator per core through
Gymnasium (`data_prep/scienceworld-v0`, which omits the package's extra work per step), and the `scienceworld` package
in one process. All are reset before timing.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv
from scienceworld import ScienceWorldEnv

import loopwm.worlds.gym  # noqa: F401 - registers loopwm/ScienceWorld-v0

REAL = "lab.agents.text_gym:lab/scienceworld-v0"
ACTIONS = (
    "open door to kitchen",
    "go to kitchen",
    "look around",
    "pick up thermometer",
    "open cupboard",
    "inventory",
    "open fridge",
    "go to hallway",
)


def steps_per_second(envs: VectorEnv[Any, Any, Any], rounds: int) -> float:
    """Return the steps per second of `rounds` steps in each environment; neighbours take different actions."""
    envs.reset(seed=0, options={"task": "boil"})
    started = time.perf_counter()
    for i in range(rounds):
        envs.step([ACTIONS[(i + number) % len(ACTIONS)] for number in range(envs.num_envs)])
    return rounds * envs.num_envs / (time.perf_counter() - started)


def package_steps_per_second(steps: int) -> float:
    env = ScienceWorldEnv()
    env.load("boil", 0, "")
    env.reset()
    started = time.perf_counter()
    for i in range(steps):
        env.step(ACTIONS[i % len(ACTIONS)])
    rate = steps / (time.perf_counter() - started)
    env.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", help="of a running service that keeps the imagined worlds")
    parser.add_argument("--envs", type=int, default=64, help="imagined worlds")
    parser.add_argument("--rounds", type=int, default=16, help="steps of each")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    imagined = gymnasium.make_vec("loopwm/ScienceWorld-v0", num_envs=arguments.envs, url=arguments.url)
    real = gymnasium.make_vec(REAL, num_envs=cores, vectorization_mode="async")
    rate = steps_per_second(imagined, arguments.rounds)
    print(f"{arguments.envs} imagined worlds: {rate:.1f} steps/s on {cores} cores")
    simulated = steps_per_second(real, 8 * arguments.rounds)
    print(f"{cores} simulators: {simulated:.1f} steps/s, ratio {rate / simulated:.2f}")
    package = package_steps_per_second(8 * arguments.rounds)
    print(f"the package in one process: {package:.1f} steps/s, ratio by core {rate / cores / package:.2f}")
    for envs in (imagined, real):
        envs.close()


if __name__ == "__main__":
    main()
