"""CPU time of the simulator's JVM per transition, with the jar's parser and with `Names`.

    python -m lab.benchmarks.scienceworld_parser --tasks boil mendelian-genetics-known-plant --variations 4

Both play the same episodes, with equal results, and alternate. Counts the thread that plays without the compilers,
which finish within minutes of a collection of hours. The first round is a warm-up. Linux only.
"""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from pathlib import Path
from random import Random

from data_prep.collect import play
from data_prep.environments.scienceworld.environment import ScienceWorld
from data_prep.plan import CollectionPlan
from data_prep.solutions import solve
from lab.data import collect_deviations
from loopwm.records.episodes import Episode

TASKS = ("boil", "find-plant", "grow-plant", "test-conductivity", "mendelian-genetics-known-plant")
POLICIES = ("gold", "noisy-expert", "fork")


def thread_seconds(process: int) -> float:
    """Return the CPU time of the threads that answer calls and collect garbage."""
    ticks = 0
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        if name.startswith(("Thread-", "VM Thread")):
            ticks += sum(map(int, rest.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def play_round(
    environment: ScienceWorld, policy: str, task: str, variations: int, solutions: Path | None
) -> tuple[float, list[Episode]]:
    plan = CollectionPlan("scienceworld", "train", policy, 1, 160, 0, ())
    seconds, episodes = 0.0, []
    for variation in environment.variations(task, "train")[:variations]:
        gold = solve(environment, task, variation, solutions)
        start = thread_seconds(environment._process.pid)
        episodes.append(play(environment, plan, task, variation, gold, Random(f"{policy}/{task}/{variation}")))
        seconds += thread_seconds(environment._process.pid) - start
    return seconds, episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--variations", type=int, default=4, help="of each task")
    parser.add_argument("--solutions", type=Path, help="folder of solutions, as of the collector")
    args = parser.parse_args()
    collect_deviations.register()
    with closing(ScienceWorld(quick=False)) as jar, closing(ScienceWorld()) as ours:
        for policy in args.policies:
            for task in args.tasks:
                both = []
                for environment in (jar, ours):
                    play_round(environment, policy, task, args.variations, args.solutions)
                    both.append(play_round(environment, policy, task, args.variations, args.solutions))
                assert both[0][1] == both[1][1], f"{policy}, {task}: episodes differ"
                count = sum(len(episode.steps) - 1 for episode in both[0][1])
                before, after = (1000 * seconds / count for seconds, _ in both)
                print(f"{policy}, {task}: {before:.2f} ms, {after:.2f} ms: {before / after:.2f} times", flush=True)


if __name__ == "__main__":
    main()
