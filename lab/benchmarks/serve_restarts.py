"""Restarts behind nginx: requests that fail and steps that are lost while the service is replaced again and again.

    python -m lab.benchmarks.serve_restarts --restarts 20 --rate 50

This process holds the socket, as systemd does with deploy/loopwm.socket, and passes it to each service in turn.
Requests come at a steady rate through nginx, each on a connection of its own: one in ten imagines a step of one of 32
worlds, the others read a world. A step is lost if its answer came and the world does not count it. A step without an
answer may be counted in place of a lost one, so the lost steps are given by bounds. Needs nginx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from loopwm.records.command import above_zero, doc_parser, positive
from loopwm.records.files import PACKAGED

WORLDS = 32
READS_PER_STEP = 9

PASS_SOCKET = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.executable, [sys.executable, "-m", "serve", *sys.argv[2:]])
"""

NGINX = """daemon off; pid {folder}/pid; error_log {folder}/error; worker_processes 1;
events {{ worker_connections 4096; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://127.0.0.1:{upstream}; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_set_header Host $host; proxy_buffering off; proxy_read_timeout 3600s;
        }}
    }}
}}
"""


class Load:
    """Requests at a steady rate.

    statuses: by status, 0 for none. seconds: of each answer. steps, unanswered: by world, with and without an answer.
    """

    def __init__(self, base: str, worlds: list[str]) -> None:
        self.base, self.worlds = base, worlds
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []
        self.steps: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.busy = {world: asyncio.Lock() for world in worlds}

    async def run(self, rate: float, stop: asyncio.Event) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client,
            asyncio.TaskGroup() as tasks,
        ):
            began, number = time.monotonic(), 0
            while not stop.is_set():
                tasks.create_task(self._request(client, number))
                number += 1
                await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))

    async def _request(self, client: httpx.AsyncClient, number: int) -> None:
        world = self.worlds[number % WORLDS]
        url = f"{self.base}/v1/worlds/{world}"
        began = time.monotonic()
        try:
            if number % (READS_PER_STEP + 1):
                answer = await client.get(url)
            else:
                async with self.busy[world]:
                    answer = await self._step(client, world)
            self.statuses[answer.status_code] += 1
        except httpx.HTTPError:
            self.statuses[0] += 1
        self.seconds.append(time.monotonic() - began)

    async def _step(self, client: httpx.AsyncClient, world: str) -> httpx.Response:
        self.unanswered[world] += 1
        answer = await client.post(f"{self.base}/v1/worlds/{world}/step", json={"actions": "wait"})
        self.unanswered[world] -= answer.is_success
        self.steps[world] += answer.is_success
        return answer


def lost_steps(
    answered: Mapping[str, int], unanswered: Mapping[str, int], final_steps: Mapping[str, int]
) -> tuple[int, int]:
    """Return the fewest and the most answered steps that were lost, whether unanswered ones took effect or not.

    final_steps: steps that each world counts at the end.
    """
    fewest = sum(max(0, count - final_steps[world]) for world, count in answered.items())
    most = sum(
        min(count, max(0, count + unanswered.get(world, 0) - final_steps[world])) for world, count in answered.items()
    )
    return fewest, most


def start(listener: socket.socket, options: list[str]) -> subprocess.Popen[str]:
    descriptor = listener.fileno()
    service = subprocess.Popen(
        [sys.executable, "-c", PASS_SOCKET, str(descriptor), *options],
        pass_fds=[descriptor],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    service.stdout.readline()
    return service


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    options = ["--model", str(args.model), "--worlds-file", str(folder / "worlds.sqlite"), "--access-log", "off"]
    with (
        socket.create_server(("127.0.0.1", 0), backlog=4096) as listener,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        port = free.getsockname()[1]
        free.close()
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, port=port, upstream=listener.getsockname()[1]), encoding="utf-8")
        nginx = subprocess.Popen(["nginx", "-e", str(folder / "error"), "-c", str(config)])
        base = f"http://127.0.0.1:{port}"
        service = await asyncio.to_thread(start, listener, options)
        downtimes = []
        try:
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                model = (await client.get(f"{base}/v1/models")).json()["data"][0]["id"]
                body = {"model": model, "goal": "Your task is to boil water.", "observation": args.observation}
                worlds = [(await client.post(f"{base}/v1/worlds", json=body)).json()["id"] for _ in range(WORLDS)]
            load, stop = Load(base, worlds), asyncio.Event()
            running = asyncio.create_task(load.run(args.rate, stop))
            for number in range(args.restarts):
                await asyncio.sleep(args.between)
                began = time.monotonic()
                service.send_signal(signal.SIGTERM)
                await asyncio.to_thread(service.wait)
                service = await asyncio.to_thread(start, listener, options)
                downtimes.append(time.monotonic() - began)
                print(f"restart {number + 1}: {downtimes[-1]:.1f} s, {dict(load.statuses)}", file=sys.stderr)
            await asyncio.sleep(args.between)
            stop.set()
            await running
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                final = {world: (await client.get(f"{base}/v1/worlds/{world}")).json() for world in worlds}
        finally:
            service.kill()
            nginx.terminate()
    final_steps = {world: reply.get("imagined_steps", 0) for world, reply in final.items()}  # a lost world counts none
    fewest, most = lost_steps(load.steps, load.unanswered, final_steps)
    p50, p99 = np.percentile(load.seconds, [50, 99])
    return {
        "restarts": len(downtimes),
        "seconds of a restart": round(float(np.mean(downtimes)), 1),
        "requests": sum(load.statuses.values()),
        "statuses": dict(load.statuses),
        "steps answered": sum(load.steps.values()),
        "steps lost": fewest,
        "steps lost at most": most,
        "p50 seconds": round(float(p50), 3),
        "p99 seconds": round(float(p99), 1),
        "most seconds": round(max(load.seconds), 1),
    }


def main() -> int:
    parser = doc_parser(f"python -m {__spec__.name}", __doc__)
    parser.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint folder")
    parser.add_argument("--restarts", type=positive, default=20)
    parser.add_argument("--rate", type=above_zero, default=50.0, help="requests per second (default: 50)")
    parser.add_argument("--between", type=above_zero, default=5.0, help="seconds between restarts (default: 5)")
    parser.add_argument("--observation", default="This room is called the kitchen.", help="first of each world")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # nginx's worker is another user
        print(json.dumps(asyncio.run(measure(args, Path(folder))), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
