"""Frames a second of games in the service: the simulator, the imagined world, and their pictures over HTTP.

    taskset -c 0 python -m lab.benchmarks.pixel_games

For each packaged world, random actions and the agent's. Prints frames a second of wall time, at most 60, and the CPU
time of the service for a frame, which depends less on what else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from serve.pixels.games import MODELS

PLAYERS = {"random actions": ".", "the agent": "A"}
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: int) -> float:
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def play(client: httpx.Client, model: str, keys: str, game: str | None) -> list[dict[str, object]]:
    response = client.post("/v1/games", json={"model": model, "id": game, "keys": keys}).raise_for_status()
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--frames", type=int, default=300, help="of each world and player, at most 1000")
    args = parser.parse_args()
    command = [sys.executable, "-m", "serve", "--port", "0", "--access-log", "off"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            base = server.stdout.readline().split()[-1].removesuffix("/v1")
            with httpx.Client(base_url=base, timeout=None, trust_env=False) as client:
                for model in MODELS:
                    game = str(play(client, model, "", None)[0]["id"])
                    for player, key in PLAYERS.items():
                        wall, cpu = time.perf_counter(), cpu_seconds(server.pid)
                        count = len(play(client, model, key * args.frames, game))
                        wall, cpu = time.perf_counter() - wall, cpu_seconds(server.pid) - cpu
                        rate, milliseconds = count / wall, 1000 * cpu / count
                        print(f"{model}, {player}: {rate:.1f} frames/s, {milliseconds:.1f} ms of CPU a frame")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
