"""A hog beside another key: first tokens of the other key, alone and while one key asks for ten times what is there.

    python -m lab.benchmarks.serve_hog --windows eval/suites/scienceworld-500.jsonl.gz --minutes 10

Starts a service with two keys. The hog keeps `--times` (10) as many requests open as the service has places for, in
turn: streamed answers of 512 tokens, plans of many candidates, forks that each imagine a step, prompts echoed with
their log-probabilities. A refused request is sent again when its `Retry-After` has passed, as clients do. The other
key streams the answers to one window after another, each of which differs, from a process of its own: the hog's
client needs half a core itself.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import itertools
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from lab.benchmarks.serve_load import ACTIONS, Load, Sample, messages
from loopwm.records.command import above_zero, doc_parser, positive
from loopwm.records.files import PACKAGED

KEYS = ("hog", "other")
PLAN = [[a, b, c] for a, b, c in itertools.product(ACTIONS, repeat=3)][:128]
FORKS = 16
LONG = 512
IDLE_REQUESTS = 60


class Hog:
    """Requests of one key. statuses: of its answers, 0 for none."""

    def __init__(self, client: httpx.AsyncClient, model: str, windows: Iterator[dict[str, Any]]) -> None:
        self.client, self.model, self.windows = client, model, windows
        self.statuses: Counter[int] = Counter()

    async def work(self, number: int) -> None:
        """Send requests of the worker's kind until cancelled."""
        kinds: tuple[Callable[[dict[str, Any]], Awaitable[httpx.Response]], ...]
        kinds = (self._chat, self._plan, self._forks, self._echo)
        ask = kinds[number % len(kinds)]
        while True:
            try:
                answer = await ask(next(self.windows))
            except httpx.HTTPError:
                self.statuses[0] += 1
                await asyncio.sleep(1)
                continue
            self.statuses[answer.status_code] += 1
            await asyncio.sleep(float(answer.headers.get("Retry-After", 0)) * (1 + random.random()))

    async def _chat(self, window: dict[str, Any]) -> httpx.Response:
        body = {"model": self.model, "messages": messages(window), "stream": True, "max_tokens": LONG}
        return await self.client.post("/v1/chat/completions", json={**body, "ignore_eos": True})

    async def _world(self, window: dict[str, Any], use: Callable[[str], Awaitable[httpx.Response]]) -> httpx.Response:
        body = {"model": self.model, "goal": window["goal"], "observation": window["history"][0]["observation"]}
        answer = await self.client.post("/v1/worlds", json=body)
        if not answer.is_success:
            return answer
        url = f"/v1/worlds/{answer.json()['id']}"
        try:
            return await use(url)
        finally:
            await self.client.delete(url)

    async def _plan(self, window: dict[str, Any]) -> httpx.Response:
        return await self._world(window, lambda url: self.client.post(f"{url}/plan", json={"candidates": PLAN}))

    async def _forks(self, window: dict[str, Any]) -> httpx.Response:
        return await self._world(window, self._fork)

    async def _fork(self, url: str) -> httpx.Response:
        answer = await self.client.post(f"{url}/fork", json={"count": FORKS})
        if not answer.is_success:
            return answer
        forks = [f"/v1/worlds/{fork['id']}" for fork in answer.json()["data"]]
        steps = (self.client.post(f"{fork}/step", json={"actions": ACTIONS[i % 6]}) for i, fork in enumerate(forks))
        try:
            return (await asyncio.gather(*steps))[-1]
        finally:
            await asyncio.gather(*map(self.client.delete, forks))

    async def _echo(self, window: dict[str, Any]) -> httpx.Response:
        prompt = "\n".join(message["content"] for message in messages(window))
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
        return await self.client.post("/v1/completions", json=body)


class Memory:
    """Resident memory of a process, in MiB. peak: since it was first read."""

    def __init__(self, pid: int) -> None:
        self._status, self.peak = Path(f"/proc/{pid}/status"), 0

    def read(self) -> int:
        lines = self._status.read_text(encoding="utf-8").splitlines()
        now = int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) >> 10
        self.peak = max(self.peak, now)
        return now


async def first_tokens(load: Load, memory: Memory, go_on: Callable[[int], bool]) -> dict[str, Any]:
    """Stream one answer after another while `go_on(number of answers)`; return statuses and seconds to first tokens."""
    samples: list[Sample] = []
    while go_on(len(samples)):
        samples.append(await load.chat(load.take(1)[0], max_tokens=16))
        memory.read()
    good = [sample for sample in samples if sample.error is None]
    seconds = [sample.first for sample in good if sample.first is not None]
    p50, p95 = np.percentile(seconds, [50, 95])
    return {
        "requests": len(samples),
        "refused or failed": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "without text": len(good) - len(seconds),
        "p50 seconds": round(float(p50), 3),
        "p95 seconds": round(float(p95), 3),
        "resident MiB": memory.read(),
    }


def client(base: str, key: str) -> httpx.AsyncClient:
    headers, limits = {"Authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=base, headers=headers, timeout=None, limits=limits, trust_env=False)


def be_hog(base: str, model: str, windows: list[dict[str, Any]], workers: int, end: Event, answers: Queue[Any]) -> None:
    """Send requests with a number of workers until `end` is set, then put their statuses."""

    async def run() -> Counter[int]:
        async with client(base, "hog") as http:
            hog = Hog(http, model, itertools.cycle(windows))
            tasks = [asyncio.create_task(hog.work(number)) for number in range(workers)]
            await asyncio.to_thread(end.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return hog.statuses

    answers.put(dict(asyncio.run(run())))


async def measure(args: argparse.Namespace, base: str, pid: int) -> dict[str, Any]:
    with gzip.open(args.windows, "rt", encoding="utf-8") as file:
        windows = [json.loads(line) for line in file]
    memory, workers = Memory(pid), args.times * (args.max_batch + args.max_queue)
    spawn = multiprocessing.get_context("spawn")
    end, answers = spawn.Event(), spawn.Queue()
    async with client(base, "other") as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        load = Load(http, model, windows[::2], 1, pid)
        idle = await first_tokens(load, memory, lambda count: count < IDLE_REQUESTS)
        hog = spawn.Process(target=be_hog, args=(base, model, windows[1::2], workers, end, answers))
        hog.start()
        await asyncio.sleep(args.settle)
        last = time.monotonic() + 60 * args.minutes
        beside = await first_tokens(load, memory, lambda _: time.monotonic() < last)
        end.set()
        statuses = await asyncio.to_thread(answers.get)
        hog.join()
    return {
        "hog's open requests": workers,
        "hog's answers": statuses,
        "idle": idle,
        "beside the hog": beside,
        "ratio of p95": round(beside["p95 seconds"] / idle["p95 seconds"], 1),
        "peak MiB above idle": memory.peak - idle["resident MiB"],
    }


def main() -> int:
    parser = doc_parser(f"python -m {__spec__.name}", __doc__)
    parser.add_argument("--windows", type=Path, required=True, help="window file, .jsonl.gz")
    parser.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint folder")
    parser.add_argument("--times", type=positive, default=10, help="requests of the hog for each place (default: 10)")
    parser.add_argument("--max-batch", type=positive, default=64, help="the service's (default: 64)")
    parser.add_argument("--max-queue", type=positive, default=128, help="the service's (default: 128)")
    parser.add_argument("--cache-bytes", type=positive, default=2 << 30, help="the service's (default: %(default)s)")
    parser.add_argument("--minutes", type=above_zero, default=10.0, help="time beside the hog (default: 10)")
    parser.add_argument("--settle", type=above_zero, default=20.0, help="seconds of the hog alone (default: 20)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        lines = (f"{key} {hashlib.sha256(key.encode()).hexdigest()}\n" for key in KEYS)
        keys.write_text("".join(lines), encoding="utf-8")
        options = ["--model", str(args.model), "--api-keys", str(keys), "--access-log", "off", "--port", "0"]
        sizes = ["--max-batch", args.max_batch, "--max-queue", args.max_queue, "--cache-bytes", args.cache_bytes]
        command = [sys.executable, "-m", "serve", *options, *map(str, sizes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
            assert service.stdout is not None
            base = service.stdout.readline().split()[-1].removesuffix("/v1")
            try:
                print(json.dumps(asyncio.run(measure(args, base, service.pid)), indent=1))
            finally:
                service.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
