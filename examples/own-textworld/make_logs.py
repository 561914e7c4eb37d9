"""Play generated TextWorld games, cooking and coin collector in turn, and write logs for `loopwm train`.

    python examples/own-textworld/make_logs.py --seeds 0-39 --out logs.jsonl

Needs the package `textworld`. The player follows the walkthrough half of the time and otherwise draws a command.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

STEPS = 25
INFOS = ("description", "admissible_commands", "policy_commands", "objective", "score", "won", "lost")
REFUSED = ("eat {thing}", "open {thing}", "take {thing}", "drop {thing}", "go {way}")
WAYS = ("north", "south", "east", "west")


def build(seed: int, folder: Path) -> str:
    """Compile the game of a seed and return its file."""
    import textworld
    from textworld.challenges.tw_coin_collector import coin_collector
    from textworld.challenges.tw_cooking import cooking

    options = textworld.GameOptions()
    options.seeds, options.path = seed, str(folder / f"{seed}.z8")
    if seed % 2:
        game = coin_collector.make({"level": 3 + seed % 7}, options)
    else:
        skills = {
            "recipe": 1 + seed // 2 % 2,
            "take": 1,
            "go": 6,
            "open": True,
            "cook": True,
            "cut": True,
            "drop": False,
        }
        game = cooking.make({**skills, "recipe_seed": seed, "split": "train"}, options)
    textworld.generator.compile_game(game, options)
    return str(options.path)


def choose(state: Any, rng: Random) -> str:
    """Return the next command: of the walkthrough, any admissible one, or one that may be refused."""
    chance = rng.random()
    if chance < 0.5 and state.policy_commands:
        return str(state.policy_commands[0])
    if chance < 0.9:
        return str(rng.choice(sorted(state.admissible_commands)))
    things = {command.split(" from ")[0].partition(" ")[2] for command in state.admissible_commands}
    things = sorted(thing for thing in things if thing and thing not in WAYS)
    return rng.choice(REFUSED).format(thing=rng.choice(things or ["coin"]), way=rng.choice(WAYS))


def text(feedback: str) -> str:
    """Return the feedback without the status line that the interpreter prints after the prompt."""
    return feedback.partition("\n>")[0].strip()


def play(seed: int, folder: Path) -> dict[str, Any]:
    """Play one game and return its line of the log."""
    import textworld

    env = textworld.start(build(seed, folder), textworld.EnvInfos(**dict.fromkeys(INFOS, True)))
    state, rng = env.reset(), Random(seed)
    steps: list[dict[str, Any]] = [{"observation": state.description.strip()}]
    goal, score, done = state.objective, 0, False
    while not done and len(steps) <= STEPS:
        action = choose(state, rng)
        state, _, _ = env.step(action)
        done = bool(state.won or state.lost)
        steps.append(
            {"action": action, "observation": text(state.feedback), "reward": state.score - score, "done": done}
        )
        score = state.score
    env.close()
    return {"goal": goal, "task": "coin" if seed % 2 else "cooking", "seed": seed, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-49", metavar="FIRST-LAST")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split("-"))
    with TemporaryDirectory() as folder, arguments.out.open("w", encoding="utf-8") as file:
        for seed in range(first, last + 1):
            file.write(json.dumps(play(seed, Path(folder)), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
