"""Load test of a running service: tokens per second, time to first token, p50 and p99, errors, memory.

    python -m serve --model loopwm/pretrained --max-batch 32 --max-queue 256 &
    python -m lab.benchmarks.serve_load --windows eval/suites/scienceworld-500.jsonl.gz --pid $!

Workloads, each with at most 1, 8, 32 and 128 concurrent requests (--concurrency), one after another:
- chat: streamed completions of different windows without a common prefix;
- continuations: one world, forked, one of six actions in each fork, answers cut at 32 tokens so that the longest does
not dominate;
- worlds, cold: create a world of a window and imagine its first action; warm: only the step, in as many existing
worlds, for which the service needs memory (--cache-bytes);
- plan: 32 candidates of 5 actions against one candidate. The checkpoint must have prediction heads, trained or not:
python -m loopwm.training --config configs/text-small.yaml --out runs/heads run.steps=1
model.overrides.prediction_heads=true. Use such a checkpoint for --workloads plan only: it does not end its answers.

The ratio of `continuations` to one at a time is the benefit of a shared world. For different worlds memory bandwidth is
the limit: a token of every world reads the world's keys and values, whose size the service reports. The bandwidth is
measured here, as the best of several reads of a gigabyte.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from loopwm.records.files import write_json
from loopwm.records.provenance import provenance

ACTIONS = ("look around", "wait", "open cupboard", "go to kitchen", "pick up thermometer", "inventory")

REPEATS = 5
"""Measurements of continuations at every number at once, in turn: a ratio of two is no better than its worse half."""

PLANNED_WORLDS = 30

LEAST = 32
"""Requests of a measurement, at least."""

HALF_MINUTE = 30.0

SHORT = 32
"""Tokens of a short answer, at most."""


@dataclass(frozen=True)
class Sample:
    """One request: total seconds, seconds to first token (None without text), tokens, or the cause of its failure."""

    seconds: float
    first: float | None
    tokens: int
    error: str | None = None


class Load:
    """Client of the service with a number of concurrent requests."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, windows: Sequence[dict[str, Any]], rounds: int, pid: int | None
    ) -> None:
        self.client, self.model, self.rounds, self.pid = client, model, rounds, pid
        self.results: dict[str, list[dict[str, Any]]] = {"load": [], "roof": []}
        self._windows = itertools.cycle(windows)

    def number(self, at_once: int) -> int:
        """Return the number of requests of a measurement at this concurrency."""
        return max(LEAST, self.rounds * at_once)

    def take(self, number: int) -> list[dict[str, Any]]:
        """Return windows that were not used lately, so that no prompt is cached."""
        return list(itertools.islice(self._windows, number))

    async def chat(
        self, window: dict[str, Any], heard: Callable[[], None] = lambda: None, **fields: int | bool
    ) -> Sample:
        """heard: called for every piece of the answer, which mostly is a token."""
        body = {"model": self.model, "messages": messages(window), "stream": True, **fields}
        start = time.perf_counter()
        first: float | None = None
        usage = {"completion_tokens": 0}
        async with self.client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}
        ) as response:
            if response.status_code != 200:
                return Sample(0, 0, 0, str(response.status_code))
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("choices") and event["choices"][0]["delta"].get("content"):
                    first = first if first is not None else time.perf_counter() - start
                    heard()
                usage = event.get("usage") or usage
        return Sample(time.perf_counter() - start, first, usage["completion_tokens"])

    async def create(self, window: dict[str, Any]) -> str:
        first, *steps = window["history"]
        history = [{"action": step["action"], "observation": step["observation"]} for step in steps]
        body = {"model": self.model, "goal": window["goal"], "observation": first["observation"], "history": history}
        response = await self.client.post("/v1/worlds", json=body)
        response.raise_for_status()
        return str(response.json()["id"])

    async def step(self, world: str, action: str, max_tokens: int | None = None) -> Sample:
        start = time.perf_counter()
        body = {"actions": action, "max_tokens": max_tokens}
        response = await self.client.post(f"/v1/worlds/{world}/step", json=body)
        seconds = time.perf_counter() - start
        if response.status_code != 200:
            return Sample(seconds, seconds, 0, str(response.status_code))
        return Sample(seconds, seconds, response.json()["usage"]["completion_tokens"])

    async def cold(self, window: dict[str, Any]) -> Sample:
        start = time.perf_counter()
        world = await self.create(window)
        sample = await self.step(world, window["actions"][0])
        await self.client.delete(f"/v1/worlds/{world}")
        seconds = time.perf_counter() - start
        return Sample(seconds, seconds, sample.tokens, sample.error)


def messages(window: dict[str, Any]) -> list[dict[str, str]]:
    first, *steps = window["history"]
    messages = [{"role": "system", "content": window["goal"]}, {"role": "assistant", "content": first["observation"]}]
    for step in steps:
        messages.append({"role": "user", "content": step["action"]})
        messages.append({"role": "assistant", "content": step["observation"]})
    return [*messages, {"role": "user", "content": window["actions"][0]}]


async def run(load: Load, name: str, at_once: int, works: Sequence[Callable[[], Awaitable[Sample]]]) -> float:
    """Run all requests at a concurrency, print and store their figures, return tokens per second."""
    room = asyncio.Semaphore(at_once)

    async def one(work: Callable[[], Awaitable[Sample]]) -> Sample:
        async with room:
            return await work()

    start = time.perf_counter()
    samples = await asyncio.gather(*map(one, works))
    seconds = time.perf_counter() - start
    good = [sample for sample in samples if sample.error is None]
    errors = sorted({sample.error for sample in samples if sample.error is not None})
    times = sorted(sample.seconds for sample in good) or [0.0]
    firsts = [sample.first for sample in good if sample.first is not None]
    median_first = f"{statistics.median(firsts):.2f}" if firsts else "-"
    silent = len(good) - len(firsts)
    rate = sum(sample.tokens for sample in good) / seconds
    print(
        f"| {name} | {at_once} | {rate:.0f} | {len(works) / seconds:.2f} | {median_first} | "
        f"{statistics.median(times):.2f} | {times[min(len(times) - 1, int(0.99 * len(times)))]:.2f} | "
        f"{silent} | {len(works) - len(good)} {' '.join(errors)} | {resident(load.pid)} |",
        flush=True,
    )
    figures = {"workload": name, "at_once": at_once, "tokens_per_second": rate, "without_text": silent}
    load.results["load"].append(figures)
    return rate


def resident(pid: int | None) -> str:
    """Return the service's resident memory in MiB."""
    if pid is None:
        return "-"
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return f"{int(next(line for line in lines if line.startswith('VmRSS')).split()[1]) >> 10}"


async def continuations(load: Load, window: dict[str, Any], at_once: int) -> float:
    world = await load.create(window)
    forks: list[dict[str, Any]] = []
    while len(forks) < load.number(at_once):
        response = await load.client.post(f"/v1/worlds/{world}/fork", json={"count": LEAST})
        forks += response.raise_for_status().json()["data"]
    works = [partial(load.step, fork["id"], ACTIONS[i % 6], SHORT) for i, fork in enumerate(forks)]
    rate = await run(load, "continuations", at_once, works)
    for name in [world, *(fork["id"] for fork in forks)]:
        await load.client.delete(f"/v1/worlds/{name}")
    return rate


async def warm(load: Load, at_once: int) -> tuple[float, float]:
    """Tokens a second, and bytes that a world holds in the mean."""
    windows = load.take(max(LEAST, at_once))
    worlds = [await load.create(window) for window in windows]
    held = await _world_bytes(load.client) / len(worlds)
    works = [partial(load.step, world, window["actions"][0]) for world, window in zip(worlds, windows, strict=True)]
    rate = await run(load, "worlds, warm", at_once, works)
    for name in worlds:
        await load.client.delete(f"/v1/worlds/{name}")
    return rate, held


async def _world_bytes(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith("loopwm:kv_cache_bytes")).split()[1])


async def plan(load: Load) -> float:
    """Return the time of 32 candidates relative to one; NaN if the checkpoint cannot score them."""
    world = await load.create(load.take(1)[0])
    seconds, rng = [], random.Random(0)
    for candidates in ([list(ACTIONS[:5])], [rng.choices(ACTIONS, k=5) for _ in range(32)]):
        start = time.perf_counter()
        response = await load.client.post(f"/v1/worlds/{world}/plan", json={"candidates": candidates, "decode": False})
        seconds.append(time.perf_counter() - start)
        if response.status_code != 200:
            print(f"plan: {response.json()['error']['message']}")
            return math.nan
    print(f"plan: 1 x 5 {seconds[0]:.3f} s, 32 x 5 {seconds[1]:.3f} s")
    return seconds[1] / seconds[0]


def _times(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}) times"


def bandwidth() -> float:
    """Return the bytes per second that this process reads, the best of five sums of a gigabyte."""
    data = torch.ones(1 << 28)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * 4 / min(times)


# Each workload prints its rows of the table and returns what is to be said below it.


async def all_continuations(load: Load, numbers: Sequence[int]) -> list[str]:
    window = load.take(1)[0]
    turns = [{number: await continuations(load, window, number) for number in numbers} for _ in range(REPEATS)]
    low, *more = sorted(numbers)
    ratios = {high: sorted(rates[high] / rates[low] for rates in turns) for high in more}
    return [f"continuations: {high} at once have {_times(ratios[high])} the throughput of {low}" for high in more]


async def all_warm(load: Load, numbers: Sequence[int]) -> list[str]:
    lines = []
    for number in numbers:
        reads = bandwidth()
        rate, held = await warm(load, number)
        roof = reads / held
        load.results["roof"].append({"at_once": number, "tokens_per_second": roof})
        lines.append(f"{number} worlds of {held / 1e6:.1f} MB: {rate / roof:.1%} of the roof, {roof:.0f} tokens/s")
    return lines


async def all_cold(load: Load, numbers: Sequence[int]) -> list[str]:
    for number in numbers:
        works = [partial(load.cold, window) for window in load.take(load.number(number))]
        await run(load, "worlds, cold", number, works)
    return []


async def all_chats(load: Load, numbers: Sequence[int]) -> list[str]:
    for number in numbers:
        works = [partial(load.chat, window) for window in load.take(load.number(number))]
        await run(load, "chat", number, works)
    return []


async def all_plans(load: Load, numbers: Sequence[int]) -> list[str]:
    ratios = [await plan(load)]
    while not math.isnan(ratios[0]) and len(ratios) < PLANNED_WORLDS:
        ratios.append(await plan(load))
    return [f"plan: 32 x 5 takes {_times(ratios)} what 1 x 5 takes"]


async def soak(load: Load, at_once: int, minutes: float) -> None:
    """Run streams of 64 to 512 tokens after the last step for some minutes, replacing each finished one.

    Prints tokens, errors and the service's memory every half minute.
    """
    samples: list[Sample] = []
    rng = random.Random(0)
    tokens = 0

    def count() -> None:
        nonlocal tokens
        tokens += 1

    async def stream() -> None:
        while True:
            (window,) = load.take(1)
            short, length = {**window, "history": window["history"][-1:]}, rng.randint(64, 512)
            samples.append(await load.chat(short, count, max_tokens=length, ignore_eos=True))

    print(f"\n{at_once} streams\n\n| minutes | tokens/s | answers | errors | MiB |\n| --- | --- | --- | --- | --- |")
    streams = [asyncio.create_task(stream()) for _ in range(at_once)]
    started = last = time.monotonic()
    while last < started + 60 * minutes:
        broken, _ = await asyncio.wait(streams, timeout=HALF_MINUTE, return_when=asyncio.FIRST_EXCEPTION)
        for one in broken:
            one.result()
        now, failed = time.monotonic(), sum(sample.error is not None for sample in samples)
        row = f"{(now - started) / 60:.1f} | {tokens / (now - last):.0f} | {len(samples) - failed} | {failed}"
        print(f"| {row} | {resident(load.pid)} |", flush=True)
        last, tokens = now, 0
        samples.clear()
    for one in streams:
        one.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


WORKLOADS = {
    "continuations": all_continuations,
    "warm": all_warm,
    "cold": all_cold,
    "chat": all_chats,
    "plan": all_plans,
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--windows", type=Path, required=True, help="window file, .jsonl.gz")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=4, help="requests for each of those at once")
    parser.add_argument("--pid", type=int, help="of the service, for its memory")
    parser.add_argument("--minutes", type=float, default=0, help="of chats afterwards, as many as at last at once")
    parser.add_argument("--out", type=Path, help="folder for results.json, which `python -m lab results` can keep")
    args = parser.parse_args()
    with gzip.open(args.windows, "rt", encoding="utf-8") as file:
        windows = [json.loads(line) for line in file]
    random.Random(0).shuffle(windows)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=1200, trust_env=False, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        load = Load(client, model, windows, args.rounds, args.pid)
        await load.chat(load.take(1)[0])
        columns = ("workload", "at once", "tokens/s", "requests/s", "first token, p50 s", "p50 s", "p99 s", "no text")
        print(f"| {' | '.join(columns)} | errors | MiB |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        lines = [line for name in args.workloads for line in await WORKLOADS[name](load, args.concurrency)]
        if args.out:
            results = {"model": model, **load.results, "provenance": provenance("lab.benchmarks.serve_load")}
            write_json(args.out / "results.json", results)
        print("", *lines, sep="\n")
        if args.minutes:
            await soak(load, args.concurrency[-1], args.minutes)


if __name__ == "__main__":
    asyncio.run(main())
