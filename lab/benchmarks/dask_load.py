"""Load of a Dask scheduler that deals a collection to many nodes, simulated: a real scheduler, nodes that only wait.

    python -m lab.benchmarks.dask_load --nodes 100 --chunks 3000 --seconds 1

Scheduler, nodes and the client of `collect` run in this process, without a network. A node waits in place of playing
its chunk. The CPU time of a chunk is that of all three together, an upper bound of the scheduler's; what they need
while nothing is played (heartbeats) is measured apart. The last line says how long chunks must be for one core to deal
them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

from distributed import Client, LocalCluster

from data_prep.collect import Tally
from data_prep.plan import Chunk, CollectionPlan

PLAN = CollectionPlan("scienceworld", "train", "gold", episodes_per_task=30, max_steps=160, seed=0, tasks=())
IDLE_SECONDS = 5.0


@dataclass(frozen=True)
class Load:
    """Measurements. idle: CPU seconds a second of the idle cluster. chunk: CPU seconds of a chunk beside it."""

    nodes: int
    chunks: int
    wall: float
    idle: float
    chunk: float

    def shortest(self, workers: int) -> float:
        """Return the seconds of a chunk below which that many workers keep a core busy with scheduling."""
        return workers * self.chunk


def wait(plan: CollectionPlan, out: Path, solutions: Path | None, chunk: Chunk, seconds: float) -> Tally:
    """Wait in place of playing a chunk. It takes what `collect` sends to a worker."""
    time.sleep(seconds)
    return Tally(len(chunk.variations))


def measure(nodes: int, chunks: int, seconds: float) -> Load:
    options = {"processes": False, "threads_per_worker": 1, "dashboard_address": None}
    with (
        LocalCluster(n_workers=nodes, **options) as cluster,
        Client(cluster, timeout="300s") as client,
    ):
        executor = client.get_executor(pure=False)  # as `collect` does
        idle = _timed(lambda: time.sleep(IDLE_SECONDS))[1] / IDLE_SECONDS
        work = [Chunk("boil", first, tuple(range(first, first + 10))) for first in range(0, 10 * chunks, 10)]

        def play() -> None:
            futures = [executor.submit(wait, PLAN, Path("out"), None, chunk, seconds) for chunk in work]
            episodes = sum(future.result().episodes for future in as_completed(futures))
            assert episodes == 10 * chunks

        wall, busy = _timed(play)
    return Load(nodes, chunks, wall, idle, max(0.0, busy - idle * wall) / chunks)


def _timed(call: Callable[[], None]) -> tuple[float, float]:
    """Return wall and CPU seconds of a call, of all threads."""
    wall, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=32, help="simulators of a node, for the last line")
    parser.add_argument("--chunks", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a chunk")
    args = parser.parse_args()
    load = measure(args.nodes, args.chunks, args.seconds)
    print(f"{load.nodes} nodes, {load.chunks} chunks in {load.wall:.1f} s; idle: {load.idle:.3f} CPU s a second")
    print(f"a chunk: {1e3 * load.chunk:.2f} ms of CPU time of scheduler, node and client together")
    shortest = load.shortest(args.nodes * args.workers)
    print(f"{args.nodes} x {args.workers} simulators keep one core busy with chunks shorter than {shortest:.1f} s")


if __name__ == "__main__":
    main()
