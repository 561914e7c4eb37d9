"""Play TextWorldExpress games, tidying up and map reading in turn, and write logs for `loopwm train`.

    pip install textworld-express    # needs Java
    python examples/own-express/make_logs.py --seeds 0-39 --out logs.jsonl

The player follows the package's own solution half of the time and otherwise draws a command.
The same seeds write the same file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

STEPS = 25
SEARCHES = 50  # as the package: its search gives up after too many steps
GAMES = {
    "twc": "numLocations=3,numItemsToPutAway=4,includeDoors=1,limitInventorySize=0",
    "mapreader": "numLocations=8,maxDistanceApart=4,includeDoors=0,maxDistractorItemsPerLocation=2",
}
PLAYERS = {"twc": "TWCGoldAgent", "mapreader": "MapReaderGoldAgent"}
WORDS = ("open fridge", "open door to north", "close cupboard", "take coin", "take map", "move north", "move west",
         "put coin in box", "read map", "take white coat")  # fmt: skip


def solve(env: Any, name: str, seed: int) -> list[str]:
    """Return the solution that the package's player finds with `seed`, or [] if all its searches fail.

    `reset(generateGoldPath=True)` runs the same search, but seeds it from the clock: it finds another solution of `twc`
    in every run.
    """
    jvm = env._gateway.jvm
    rng, player = jvm.scala.util.Random(seed), getattr(jvm.textworldexpress.goldagent, PLAYERS[name])
    for _ in range(SEARCHES):
        # The player acts in the game that it gets.
        result = player(env.server.gameGenerator().mkGame(seed, "train")).mkGoldPath(rng)
        if result._1:
            return list(result._2)
    return []


def play(env: Any, seed: int) -> dict[str, Any]:
    """Play the game of a seed and return its line of the log."""
    name, rng = list(GAMES)[seed % len(GAMES)], Random(seed)
    env.load(gameName=name, gameParams=GAMES[name])
    solution = solve(env, name, seed)
    observation, infos = env.reset(seed=seed, gameFold="train")
    steps: list[dict[str, Any]] = [{"observation": observation.strip()}]
    done = False
    while not done and len(steps) <= STEPS:
        chance, valid = rng.random(), sorted(infos["validActions"])
        following = [action for action in solution if action in valid]
        if chance < 0.5 and following:
            action = following[0]
            solution = solution[solution.index(action) + 1 :]
        else:
            action = rng.choice(valid) if chance < 0.9 else rng.choice(WORDS)
        observation, reward, done, infos = env.step(action)
        steps.append({"action": action, "observation": observation.strip(), "reward": reward, "done": bool(done)})
    return {"goal": env.getTaskDescription(), "task": name, "seed": seed, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-39", metavar="FIRST-LAST")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    from textworld_express import TextWorldExpressEnv

    first, last = map(int, arguments.seeds.split("-"))
    env = TextWorldExpressEnv(envStepLimit=100)
    with arguments.out.open("w", encoding="utf-8") as file:
        for seed in range(first, last + 1):
            file.write(json.dumps(play(env, seed), ensure_ascii=False) + "\n")
    env.close()


if __name__ == "__main__":
    main()
