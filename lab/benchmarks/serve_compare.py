"""Compare two versions of the service under the same load, in turns.

    python -m serve --port 8001 &                     # the version to compare with, from its own checkout
    python -m serve --port 8002 &
    python -m lab.benchmarks.serve_compare --windows eval/suites/scienceworld-500.jsonl.gz \\
        --before http://127.0.0.1:8001 --now http://127.0.0.1:8002 --pids PID_BEFORE PID_NOW

Each turn measures one and then the other. Streams are completions that never end by themselves. Reported for each:
- beside creates: tokens per second of 8 streams while worlds of 1,400 tokens are created, relative to those without;
- beside a prompt: longest and mean time between two tokens of 31 streams from the arrival of a prompt of 2,000 tokens
to its first token, over the median between two tokens before;
- warm: steps in --worlds worlds in parallel per second of the service's CPU time, which does not depend on other load;
- plan: CPU time of 32 candidates of 5 actions over that of one;
- memory: maximum resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from lab.benchmarks.serve_load import ACTIONS, LEAST, Load

Json = dict[str, Any]
Figures = dict[str, float]

CREATED, CREATED_TOKENS = 8, 1400
STREAMS_BESIDE_CREATES, STREAMS_BESIDE_PROMPT = 8, 31
PROMPT_TOKENS = 2000
PLANS = 4
"""Plans of each kind: processor time is counted in hundredths of a second."""

SETTLED = 12
"""Tokens of every stream before anything is measured."""


class Text:
    """Long windows with different beginnings. text: source of their text; letters: letters per token."""

    def __init__(self, text: str, letters: float) -> None:
        self._text, self._letters, self._number = text, letters, 0

    def window(self, tokens: int) -> Json:
        self._number += 1
        lines = {"action": "", "observation": self._text[: int(self._letters * tokens)]}
        return {"goal": f"{self._number} boil water", "history": [lines], "actions": ["wait"]}


class Stream:
    """Endless completion in a thread. times: arrival of its tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def run(self, load: Load, number: int) -> None:
        body = {"model": load.model, "prompt": f"<|goal|>stream {number}", "max_tokens": 3500, "ignore_eos": True}
        async with load.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())


@asynccontextmanager
async def streaming(load: Load, count: int) -> AsyncIterator[list[Stream]]:
    """So many streams, which are well on their way."""
    streams = [Stream() for _ in range(count)]
    tasks = [asyncio.create_task(stream.run(load, number)) for number, stream in enumerate(streams)]
    try:
        while min(len(stream.times) for stream in streams) < SETTLED:
            await asyncio.sleep(0.05)
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def gaps(streams: Sequence[Stream], begin: float, end: float) -> list[float]:
    """Return the seconds between tokens that overlap an interval, including the gap open at its end."""
    seconds = []
    for stream in streams:
        times = [*stream.times, end] if stream.times[-1] < end else stream.times
        seconds += [b - a for a, b in pairwise(times) if b > begin and a < end]
    return seconds


def rate(streams: Sequence[Stream], begin: float, end: float) -> float:
    return sum(begin <= when < end for stream in streams for when in stream.times) / (end - begin)


async def beside_creates(load: Load, text: Text) -> Figures:
    async with streaming(load, STREAMS_BESIDE_CREATES) as streams:
        begin = time.perf_counter()
        await asyncio.sleep(4)
        middle = time.perf_counter()
        await asyncio.gather(*(load.create(text.window(CREATED_TOKENS)) for _ in range(CREATED)))
        end = time.perf_counter()
        alone, beside = rate(streams, begin, middle), rate(streams, middle, end)
        longest = max(gaps(streams, middle, end))
    return {"creates: tokens/s kept": beside / alone, "creates: longest gap, s": longest, "creates: s": end - middle}


async def beside_prompt(load: Load, text: Text) -> Figures:
    async with streaming(load, STREAMS_BESIDE_PROMPT) as streams:
        begin = time.perf_counter()
        await asyncio.sleep(4)
        middle = time.perf_counter()
        answer = await load.chat(text.window(PROMPT_TOKENS), max_tokens=1)
        # The only token of an answer without text is its last one.
        seconds = answer.seconds if answer.first is None else answer.first
        end = middle + seconds
        usual = statistics.median(gaps(streams, begin, middle))
        beside = gaps(streams, middle, end)
    return {
        "prompt: mean gap over the usual": statistics.mean(beside) / usual,
        "prompt: median gap over the usual": statistics.median(beside) / usual,
        "prompt: longest gap over the usual": max(beside) / usual,
        "prompt: s": seconds,
    }


def processor_seconds(load: Load) -> float:
    """Return the CPU seconds of the service."""
    fields = Path(f"/proc/{load.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def warm(load: Load, worlds: Sequence[str]) -> Figures:
    begin = processor_seconds(load)
    samples = []
    for turn in range(max(1, LEAST // len(worlds))):
        samples += await asyncio.gather(
            *(load.step(name, ACTIONS[(i + turn) % 6], 16) for i, name in enumerate(worlds))
        )
    failed = [sample.error for sample in samples if sample.error is not None]
    if failed:
        print(f"{len(failed)} of {len(samples)} steps failed: {failed[0]}")
    taken = len(samples) - len(failed)
    return {f"warm: steps a processor second, {len(worlds)} worlds": taken / (processor_seconds(load) - begin)}


async def plan(load: Load, world: str) -> Figures:
    rng, seconds = random.Random(0), []
    for candidates in ([list(ACTIONS[:5])], [rng.choices(ACTIONS, k=5) for _ in range(32)]):
        begin = processor_seconds(load)
        body = {"candidates": candidates, "decode": False}
        for _ in range(PLANS):
            (await load.client.post(f"/v1/worlds/{world}/plan", json=body)).raise_for_status()
        seconds.append((processor_seconds(load) - begin) / PLANS)
    return {"plan: 32 over 1": seconds[1] / seconds[0], "plan: processor s": seconds[1]}


async def worlds_of(load: Load, windows: Sequence[Json], count: int, history: int) -> list[str]:
    short = [{**window, "history": window["history"][-1 - history :]} for window in windows[:count]]
    return [await load.create(window) for window in short]


def most_resident(pid: int) -> float:
    """Return the maximum resident memory in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def print_table(by_version: dict[str, dict[str, list[float]]]) -> None:
    """Print medians, and the median of the ratios of both versions by turn."""
    print("| | before | now | now over before |\n| --- | --- | --- | --- |")
    for name, before in by_version["before"].items():
        now = by_version["now"][name]
        ratios = [b / a for a, b in zip(before, now, strict=True) if a]
        over = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        print(f"| {name} | {statistics.median(before):.3g} | {statistics.median(now):.3g} | {over} |", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="address of the one version")
    parser.add_argument("--now", required=True, help="address of the other")
    parser.add_argument("--pids", type=int, nargs=2, required=True, help="of both, for their memory")
    parser.add_argument("--windows", type=Path, required=True, help="window file, .jsonl.gz")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--history", type=int, default=4, help="steps of each world")
    parser.add_argument("--warm-alone", action="store_true", help="no streams")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with gzip.open(args.windows, "rt", encoding="utf-8") as file:
        windows = [json.loads(line) for line in file]
    random.Random(0).shuffle(windows)
    long = " ".join(step["observation"] for window in windows[:40] for step in window["history"])[:20_000]
    connect = partial(httpx.AsyncClient, timeout=1200, trust_env=False, limits=httpx.Limits(max_connections=None))
    by_version: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("before", "now")}
    async with connect(base_url=args.before) as before, connect(base_url=args.now) as now:
        clients = {"before": before, "now": now}
        loads, texts, worlds = {}, {}, {}
        for (name, client), pid in zip(clients.items(), args.pids, strict=True):
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            loads[name] = Load(client, model, windows, 1, pid)
            tokens = (await client.post("/tokenize", json={"prompt": long})).json()["count"]
            texts[name] = Text(long, len(long) / tokens)
            worlds[name] = await worlds_of(loads[name], windows, max(args.worlds), args.history)
        for _ in range(args.turns):
            for name, load in loads.items():
                figures: dict[str, Any] = {}
                if not args.warm_alone:
                    figures |= await beside_creates(load, texts[name]) | await beside_prompt(load, texts[name])
                for count in args.worlds:
                    figures |= await warm(load, worlds[name][:count])
                figures |= await plan(load, worlds[name][0])
                for label, figure in figures.items():
                    by_version[name][label].append(figure)
            print_table(by_version)
    for name, pid in zip(by_version, args.pids, strict=True):
        by_version[name] = {"memory: most MiB": [most_resident(pid)]}
    print_table(by_version)


if __name__ == "__main__":
    asyncio.run(main())
