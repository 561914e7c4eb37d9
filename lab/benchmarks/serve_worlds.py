"""Cost of more worlds than fit in memory.

    python -m serve --model loopwm/pretrained --cache-bytes 256000000 &
    python -m lab.benchmarks.serve_worlds --windows eval/suites/scienceworld-500.jsonl.gz --worlds 300 --steps 3 \\
        --pid $!

Creates worlds by `POST /v1/worlds:batch`, each of another window with its last --history steps, and prints the
service's memory. Then steps the last --few of them, which are still in memory, and then all in turn, an order in which
the least recently used is evicted just before its step: each world is encoded again.
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
    """Worlds of a service, with their timings."""

    def __init__(self, client: httpx.Client, pid: int | None) -> None:
        self._client, self._pid = client, pid
        self._model = client.get("/v1/models").json()["data"][0]["id"]
        self.names: list[str] = []

    def create(self, windows: list[Json], count: int, history: int) -> None:
        requests = [self._world(window, number, history) for number, window in enumerate(_take(windows, count))]
        started = time.perf_counter()
        answers = self._batches(requests)
        self.names = [answer["body"]["id"] for answer in answers]
        tokens = sum(answer["body"]["tokens"] for answer in answers)
        seconds = time.perf_counter() - started
        print(
            f"{count} worlds of {tokens / count:.0f} tokens in the mean: {seconds:.0f} s, {self.memory()}", flush=True
        )

    def step(self, names: list[str], label: str) -> float:
        """Return the steps per second of one step in each of these, `AT_ONCE` in parallel."""
        requests = [
            {"op": "step", "world": name, "actions": ACTIONS[i % len(ACTIONS)], "max_tokens": 8}
            for i, name in enumerate(names)
        ]
        started = time.perf_counter()
        self._batches(requests)
        rate = len(names) / (time.perf_counter() - started)
        print(f"{label}: {rate:.2f} steps/s, {self.memory()}", flush=True)
        return rate

    def memory(self) -> str:
        lines = self._client.get("/metrics").text.splitlines()
        held = float(next(line for line in lines if line.startswith("loopwm:kv_cache_bytes")).split()[1])
        return f"{resident(self._pid)} MiB, {held / 1e6:.0f} MB of them keys and values"

    def _world(self, window: Json, number: int, history: int) -> Json:
        first, *steps = window["history"][-1 - history :]
        transitions = [{"action": step["action"], "observation": step["observation"]} for step in steps]
        goal, observation = window["goal"], f"{first['observation']} ({number})"
        return {"op": "create", "model": self._model, "goal": goal, "observation": observation, "history": transitions}

    def _batches(self, requests: list[Json]) -> list[Json]:
        """Send the batches; raise for a failed request."""
        answers: list[Json] = []
        for begin in range(0, len(requests), AT_ONCE):
            response = self._client.post("/v1/worlds:batch", json={"requests": requests[begin : begin + AT_ONCE]})
            answers += response.raise_for_status().json()["data"]
        failed = [answer for answer in answers if answer["status"] >= 400]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(requests)} requests failed: {failed[0]['body']}")
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
