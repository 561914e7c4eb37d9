"""More worlds than memory has room for: what they cost, and that their steps come none the less.

    python -m serve --model loopwm/pretrained --cache-bytes 256000000 &
    python -m lab.benchmarks.serve_worlds --windows eval/suites/scienceworld-500.jsonl.gz --worlds 300 --steps 3 \\
        --pid $!

Creates worlds by `POST /v1/worlds:batch`, each of another window with its last --history steps, and prints what the
service holds. Then the last --few of them are stepped, which are still in memory, and then all in turn, in which order
the least recently used goes just before it is needed: each world is encoded again.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx

from lab.benchmarks.serve_load import ACTIONS, resident

AT_ONCE = 64
"""Requests of a batch."""

Json = dict[str, Any]


class Worlds:
    """Worlds of a service, and how long they take."""

    def __init__(self, client: httpx.Client, pid: int | None) -> None:
        self._client, self._pid = client, pid
        self._model = client.get("/v1/models").json()["data"][0]["id"]
        self.names: list[str] = []

    def create(self, windows: list[Json], count: int, history: int) -> None:
        asked = [self._world(window, number, history) for number, window in enumerate(_take(windows, count))]
        begun = time.perf_counter()
        answers = self._batches(asked)
        self.names = [answer["body"]["id"] for answer in answers]
        tokens = sum(answer["body"]["tokens"] for answer in answers)
        seconds = time.perf_counter() - begun
        print(
            f"{count} worlds of {tokens / count:.0f} tokens in the mean: {seconds:.0f} s, {self.memory()}", flush=True
        )

    def step(self, names: list[str], told: str) -> float:
        """Steps a second of one step in each of these, `AT_ONCE` side by side."""
        asked = [
            {"op": "step", "world": name, "actions": ACTIONS[i % len(ACTIONS)], "max_tokens": 8}
            for i, name in enumerate(names)
        ]
        begun = time.perf_counter()
        self._batches(asked)
        rate = len(names) / (time.perf_counter() - begun)
        print(f"{told}: {rate:.2f} steps/s, {self.memory()}", flush=True)
        return rate

    def memory(self) -> str:
        lines = self._client.get("/metrics").text.splitlines()
        held = float(next(line for line in lines if line.startswith("loopwm:kv_cache_bytes")).split()[1])
        return f"{resident(self._pid)} MiB, {held / 1e6:.0f} MB of them keys and values"

    def _world(self, window: Json, number: int, history: int) -> Json:
        first, *steps = window["history"][-1 - history :]
        told = [{"action": step["action"], "observation": step["observation"]} for step in steps]
        goal, seen = window["goal"], f"{first['observation']} ({number})"
        return {"op": "create", "model": self._model, "goal": goal, "observation": seen, "history": told}

    def _batches(self, asked: list[Json]) -> list[Json]:
        """Raises for a request that was not answered well."""
        answers: list[Json] = []
        for begin in range(0, len(asked), AT_ONCE):
            response = self._client.post("/v1/worlds:batch", json={"requests": asked[begin : begin + AT_ONCE]})
            answers += response.raise_for_status().json()["data"]
        failed = [answer for answer in answers if answer["status"] >= 400]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(asked)} requests failed: {failed[0]['body']}")
        return answers


def _take(windows: list[Json], count: int) -> list[Json]:
    return list(itertools.islice(itertools.cycle(windows), count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--windows", type=Path, required=True, help="window file, .jsonl.gz")
    parser.add_argument("--worlds", type=int, default=3000)
    parser.add_argument("--history", type=int, default=0, help="steps of each world")
    parser.add_argument("--few", type=int, default=32, help="worlds that are stepped first")
    parser.add_argument("--steps", type=int, default=1, help="of every world")
    parser.add_argument("--pid", type=int, help="of the service, for its memory")
    args = parser.parse_args()
    with gzip.open(args.windows, "rt", encoding="utf-8") as file:
        windows = [json.loads(line) for line in file]
    with httpx.Client(base_url=args.url, timeout=3600, trust_env=False) as client:
        worlds = Worlds(client, args.pid)
        print(f"before: {worlds.memory()}")
        worlds.create(windows, args.worlds, args.history)
        few = worlds.step(worlds.names[-args.few :], f"the last {args.few}")
        for turn in range(args.steps):
            rate = worlds.step(worlds.names, f"all, turn {turn + 1}")
            print(f"a step of one of all takes {few / rate:.1f} times one of the last {args.few}")


if __name__ == "__main__":
    main()
