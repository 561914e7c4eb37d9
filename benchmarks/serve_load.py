"""A running service under load: tokens a second, time to the first token, p50 and p99, errors, memory.

    python -m serve --model loopwm/pretrained --max-batch 32 --max-queue 256 &
    python benchmarks/serve_load.py --windows eval/suites/scienceworld-500.jsonl.gz --pid $!

Workloads, each at 1, 8, 32 and 128 requests at once (--concurrency):
- chat: streamed completions of different windows, nothing shared;
- continuations: one kept world, forked, another action in each fork;
- worlds, cold: create a world of a window and imagine its first action; warm: the step alone, in worlds kept before;
- plan: 32 candidates of 5 actions against one candidate (checkpoints with prediction heads).

The ratio of `continuations` to one at a time is what sharing a world is worth. For different worlds the roof is memory:
a token of every row reads the row's keys and values and, once for all rows, the weights. The roof is measured here, as
the best of several reads of a gigabyte.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

ACTIONS = ("look around", "wait", "open cupboard", "go to kitchen", "pick up thermometer", "inventory")


@dataclass(frozen=True)
class Sample:
    """One request: seconds in all, seconds to its first token, tokens; or why it failed."""

    seconds: float
    first: float
    tokens: int
    error: str | None = None


class Load:
    """A client of the service at a number of requests at once."""

    def __init__(self, client: httpx.AsyncClient, model: str, windows: Sequence[dict[str, Any]]) -> None:
        self.client, self.model, self.windows = client, model, windows

    async def chat(self, number: int) -> Sample:
        body = {"model": self.model, "messages": _messages(self.windows[number % len(self.windows)]), "stream": True}
        start = time.perf_counter()
        first, usage = 0.0, {"completion_tokens": 0}
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
                    first = first or time.perf_counter() - start
                usage = event.get("usage") or usage
        return Sample(time.perf_counter() - start, first, usage["completion_tokens"])

    async def create(self, number: int) -> str:
        window = self.windows[number % len(self.windows)]
        first, *steps = window["history"]
        history = [{"action": step["action"], "observation": step["observation"]} for step in steps]
        body = {"model": self.model, "goal": window["goal"], "observation": first["observation"], "history": history}
        response = await self.client.post("/v1/worlds", json=body)
        response.raise_for_status()
        return str(response.json()["id"])

    async def step(self, world: str, action: str) -> Sample:
        start = time.perf_counter()
        response = await self.client.post(f"/v1/worlds/{world}/step", json={"actions": action})
        seconds = time.perf_counter() - start
        if response.status_code != 200:
            return Sample(seconds, seconds, 0, str(response.status_code))
        return Sample(seconds, seconds, response.json()["usage"]["completion_tokens"])

    async def cold(self, number: int) -> Sample:
        start = time.perf_counter()
        world = await self.create(number)
        sample = await self.step(world, self.windows[number % len(self.windows)]["actions"][0])
        await self.client.delete(f"/v1/worlds/{world}")
        seconds = time.perf_counter() - start
        return Sample(seconds, seconds, sample.tokens, sample.error)


def _messages(window: dict[str, Any]) -> list[dict[str, str]]:
    first, *steps = window["history"]
    messages = [{"role": "system", "content": window["goal"]}, {"role": "assistant", "content": first["observation"]}]
    for step in steps:
        messages.append({"role": "user", "content": step["action"]})
        messages.append({"role": "assistant", "content": step["observation"]})
    return [*messages, {"role": "user", "content": window["actions"][0]}]


async def run(name: str, number: int, work: Callable[[int], Awaitable[Sample]], pid: int | None) -> float:
    """Runs `number` requests at once, prints their figures, returns requests a second."""
    start = time.perf_counter()
    samples = await asyncio.gather(*(work(i) for i in range(number)))
    seconds = time.perf_counter() - start
    good = [sample for sample in samples if sample.error is None]
    errors = sorted({sample.error for sample in samples if sample.error is not None})
    times = sorted(sample.seconds for sample in good) or [0.0]
    firsts = [sample.first for sample in good] or [0.0]
    tokens = sum(sample.tokens for sample in good)
    print(
        f"| {name} | {number} | {tokens / seconds:.0f} | {number / seconds:.2f} | {statistics.median(firsts):.2f} | "
        f"{statistics.median(times):.2f} | {times[min(len(times) - 1, int(0.99 * len(times)))]:.2f} | "
        f"{number - len(good)} {' '.join(errors)} | {_resident(pid)} |",
        flush=True,
    )
    return number / seconds


def _resident(pid: int | None) -> str:
    """Resident memory of the service in MiB."""
    if pid is None:
        return "-"
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return f"{int(next(line for line in lines if line.startswith('VmRSS')).split()[1]) >> 10}"


async def continuations(load: Load, number: int, pid: int | None) -> float:
    world = await load.create(0)
    forks = (await load.client.post(f"/v1/worlds/{world}/fork", json={"count": number})).json()["data"]
    rate = await run("continuations", number, lambda i: load.step(forks[i]["id"], f"{ACTIONS[i % 6]}"), pid)
    for name in [world, *(fork["id"] for fork in forks)]:
        await load.client.delete(f"/v1/worlds/{name}")
    return rate


async def warm(load: Load, number: int, pid: int | None) -> float:
    worlds = [await load.create(i) for i in range(number)]
    rate = await run("worlds, warm", number, lambda i: load.step(worlds[i], load.windows[i]["actions"][0]), pid)
    for name in worlds:
        await load.client.delete(f"/v1/worlds/{name}")
    return rate


async def plan(load: Load) -> None:
    world = await load.create(0)
    seconds = []
    for candidates in ([list(ACTIONS[:5])], [[*ACTIONS[:4], ACTIONS[i % 6]] for i in range(32)]):
        start = time.perf_counter()
        response = await load.client.post(f"/v1/worlds/{world}/plan", json={"candidates": candidates, "decode": False})
        seconds.append(time.perf_counter() - start)
        if response.status_code != 200:
            print(f"\nplan: {response.json()['error']['message']}")
            return
    print(f"\nplan: 1 x 5 {seconds[0]:.3f} s, 32 x 5 {seconds[1]:.3f} s, ratio {seconds[1] / seconds[0]:.2f}")


def bandwidth() -> float:
    """Gigabytes a second that this machine reads, the best of five sums of a gigabyte."""
    data = torch.ones(1 << 28)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * 4 / min(times) / 1e9


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--windows", type=Path, required=True, help="window file, .jsonl.gz")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--pid", type=int, help="of the service, for its memory")
    parser.add_argument("--minutes", type=float, default=0, help="then chat at the second concurrency for so long")
    args = parser.parse_args()
    with gzip.open(args.windows, "rt", encoding="utf-8") as file:
        windows = [json.loads(line) for line in file]
    random.Random(0).shuffle(windows)
    print(f"memory: {bandwidth():.1f} GB/s read by this process\n")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=1200, trust_env=False, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        load = Load(client, model, windows)
        await load.chat(len(windows) - 1)
        print("| workload | at once | tokens/s | requests/s | first token, p50 s | p50 s | p99 s | errors | MiB |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        rates = {number: await continuations(load, number, args.pid) for number in args.concurrency}
        for number in args.concurrency:
            await warm(load, number, args.pid)
        for number in args.concurrency:
            await run("worlds, cold", number, load.cold, args.pid)
        for number in args.concurrency:
            await run("chat", number, load.chat, args.pid)
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end:
            await run("chat, again", args.concurrency[min(1, len(args.concurrency) - 1)], load.chat, args.pid)
        low, *_, high = sorted(rates)
        print(f"\ncontinuations: {high} at once have {rates[high] / rates[low]:.1f} times the throughput of {low}")
        await plan(load)


if __name__ == "__main__":
    asyncio.run(main())
