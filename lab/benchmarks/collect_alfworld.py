"""CPU seconds of ALFWorld's engine in the collector, against the packages' own environment.

    python -m lab.benchmarks.collect_alfworld --games 6

Both play the same commands in the same built games. The packages' environment yields observation and admissible
commands of each step; the collector's yields look and inventory as well. CPU time hardly depends on other load; the
cost of the pipe to the engine's process is excluded.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from data_prep.environments.alfworld.games import TASKS, build_game, list_games
from data_prep.environments.alfworld.simulator import Simulator


def commands_for(first_observation: str) -> list[str]:
    """Return commands that go to the first receptacles of the room and open them, openable or not."""
    receptacles = re.findall(r"a (\w+ \d+)", first_observation.partition("Your task")[0])[:8]
    return [f"{verb} {receptacle}" for receptacle in receptacles for verb in ("go to", "open")]


def play_package(game: dict[str, Any]) -> tuple[float, float, int]:
    """Return seconds to load and reset, seconds to play, and steps."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    with TemporaryDirectory() as folder:
        path = Path(folder) / "game.tw-pddl"
        path.write_text(json.dumps(game))
        start = process_time()
        environment = AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True)))
        environment.load(str(path))
        commands = commands_for(environment.reset().feedback)
    loaded = process_time()
    for command in commands:
        environment.step(command)
    return loaded - start, process_time() - loaded, len(commands)


def play_ours(simulator: Simulator, game: dict[str, Any]) -> tuple[float, float, int]:
    """Return seconds to load, seconds to play, and steps."""
    start = process_time()
    commands = commands_for(simulator.load(game)["observation"])
    loaded = process_time()
    for command in commands:
        simulator.step(command)
    return loaded - start, process_time() - loaded, len(commands)


def report(name: str, runs: list[tuple[float, float, int]]) -> None:
    load, play, steps = (sum(column) for column in zip(*runs, strict=True))
    print(f"{name}: {load / len(runs):.2f} s a game to load, {1000 * play / steps:.1f} ms a step ({steps} steps)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--games", type=int, default=6, help="games, of all tasks in turn")
    count = parser.parse_args().games
    names = [Random(i).choice(list_games(TASKS[i % len(TASKS)])) for i in range(count)]
    games = [build_game(name) for name in names]
    report("packages", [play_package(game) for game in games])  # first: our engine changes TextWorld in this process
    simulator = Simulator()
    report("collector, new games", [play_ours(simulator, game) for game in games])
    report("collector, games it has grounded", [play_ours(simulator, game) for game in games])


if __name__ == "__main__":
    main()
