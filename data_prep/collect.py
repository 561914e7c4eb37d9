"""Collect episodes from a simulator: one file for each chunk of a task's episodes; for frames, one an episode.

The plan (`plan.py`) decides the work, and files are written atomically. So an interrupted run that is started again
yields the same files: chunks whose file exists are skipped. The distribution of work over processes, machines
(`--shard`) or a Dask cluster (`--dask`) does not change the files. Failed episodes are listed in `failed/` and retried
by the next run; `manifest.json` lists the folder's content and the simulator's version.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from threading import local
from typing import Any

from tqdm import tqdm

from data_prep.environments import ENVIRONMENTS, make_environment
from data_prep.environments.base import Environment, SimulatorError
from data_prep.environments.pixels.by_name import FRAME_ENVIRONMENTS, is_frame_environment
from data_prep.plan import Chunk, CollectionPlan, load_or_make_chunks, parse_shard
from data_prep.policies import POLICIES
from data_prep.solutions import solve
from loopwm.records.command import positive
from loopwm.records.episodes import Episode, write_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import read_lines, write_json, write_lines
from loopwm.records.provenance import checkout

EXAMPLE = (
    "python -m data_prep collect scienceworld --split train --policy gold --episodes-per-task 40 --workers 2 "
    "--out data/episodes/train-gold"
)

MANIFEST = "manifest.json"
FAILED = "failed"


@dataclass
class Tally:
    """Counts of a chunk or a run."""

    episodes: int = 0
    transitions: int = 0
    failures: tuple[str, ...] = ()


def play(
    environment: Environment, plan: CollectionPlan, task: str, variation: int | str, gold: Sequence[str], rng: Random
) -> Episode:
    """Play one episode that follows a solution, or strays from it.

    Raises SimulatorError, also if the environment has switched to another world by the end.
    """
    steps = [environment.reset(task, variation)]
    goal, hidden_state = environment.goal(), environment.hidden_state()
    actions = POLICIES[plan.policy].act(environment, gold, rng)
    action = next(actions, None)
    while action is not None:
        step = environment.step(action)
        if len(steps) % plan.hidden_every == 0:
            step = replace(step, hidden_state=environment.hidden_state())
        steps.append(step)
        action = None
        if not step.done and len(steps) <= plan.max_steps:
            with suppress(StopIteration):
                action = actions.send(step)
    if environment.loaded() != (task, variation) or environment.goal() != goal:
        raise SimulatorError("the environment has switched to another world")
    return Episode(environment.name, task, variation, plan.split, plan.policy, goal, tuple(steps), hidden_state)


class Collector:
    """Plays chunks in one environment of its own."""

    def __init__(self, plan: CollectionPlan, out: Path, solutions: Path | None) -> None:
        self.plan, self.out, self.solutions = plan, out, solutions
        self.environment = make_environment(plan.env)

    def play_chunk(self, chunk: Chunk) -> Tally:
        """Play and write one chunk; an episode that fails twice is left out and recorded as failed."""
        episodes, failures = [], []
        for i, variation in enumerate(chunk.variations):
            if self.environment.exhausted():
                self._renew()
            try:
                episodes.append(self._play_or_retry(chunk.task, variation, chunk.first + i))
            except SimulatorError as error:
                failures.append(f"{chunk.task}, variation {variation}: {error}")
        failed = failures_file(self.out, chunk)
        if failures:
            write_lines(failed, failures)
        write_episodes(self.out / chunk.file_name, episodes)
        if not failures:
            failed.unlink(missing_ok=True)
        return Tally(len(episodes), sum(len(episode.steps) - 1 for episode in episodes), tuple(failures))

    def _play_or_retry(self, task: str, variation: int | str, index: int) -> Episode:
        """Play an episode, once more in a fresh simulator if the first breaks down: the result is the same."""
        try:
            return self._play(task, variation, index)
        except SimulatorError:
            self._renew()
            return self._play(task, variation, index)

    def _renew(self) -> None:
        self.environment.close()
        self.environment = make_environment(self.plan.env)

    def _play(self, task: str, variation: int | str, index: int) -> Episode:
        plan, needs_gold = self.plan, POLICIES[self.plan.policy].needs_gold
        rng = Random(f"{plan.seed}/{plan.policy}/{task}/{index}")
        gold = solve(self.environment, task, variation, self.solutions) if needs_gold else []
        return play(self.environment, plan, task, variation, gold, rng)


def failures_file(out: Path, chunk: Chunk) -> Path:
    return out / FAILED / f"{chunk.task}-{chunk.first:05d}.txt"


def collect(plan: CollectionPlan, out: Path, executor: Executor, shard: slice, solutions: Path | None = None) -> Tally:
    """Play all chunks of the shard that have no file yet, or had failures. `executor`'s workers must see the folders.

    Raises InputError if a worker process dies; collected files stay.
    """
    chunks = load_or_make_chunks(plan, out)[shard]
    todo = [c for c in chunks if not (out / c.file_name).exists() or failures_file(out, c).exists()]
    total = Tally()
    started = time.monotonic()
    total_episodes, left = (sum(len(chunk.variations) for chunk in some) for some in (chunks, todo))
    with tqdm(total=total_episodes, initial=total_episodes - left, unit="episode") as bar:
        for tally in _play_all(executor, plan, out, solutions, todo):
            total.episodes += tally.episodes
            total.transitions += tally.transitions
            total.failures += tally.failures
            bar.update(tally.episodes + len(tally.failures))
            bar.set_postfix_str(f"{total.transitions / (time.monotonic() - started):.1f} transitions/s")
    return total


def _play_all(
    executor: Executor, plan: CollectionPlan, out: Path, solutions: Path | None, chunks: list[Chunk]
) -> Iterator[Tally]:
    futures = [executor.submit(_play_in_worker, plan, out, solutions, chunk) for chunk in chunks]
    try:
        for future in as_completed(futures):
            yield future.result()
    except BrokenExecutor as error:
        raise InputError(f"{out}: a worker process died; rerun the command to resume") from error
    finally:
        for future in futures:
            future.cancel()


@contextmanager
def dask_executor(scheduler: str) -> Iterator[Executor]:
    """Yield the workers of a Dask cluster, which retries lost work on the others. Raises InputError."""
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise InputError(f"--dask: the package {error.name} is not installed (extra: dask)") from error
    try:
        client = Client(scheduler, timeout="5s")
    except (OSError, ValueError) as error:
        raise InputError(f"--dask: must be a scheduler, none answers at {scheduler!r} ({error})") from error
    with client:
        yield client.get_executor(pure=False)


_of_thread = local()
"""Collectors of a thread: two episodes in one simulator at once would mix up their worlds."""


def _play_in_worker(plan: CollectionPlan, out: Path, solutions: Path | None, chunk: Chunk) -> Tally:
    """Play a chunk with the thread's collector. The simulators end with the process."""
    collectors: dict[Any, Collector] = _of_thread.__dict__.setdefault("collectors", {})
    key = plan, out, solutions
    if key not in collectors:
        collectors[key] = Collector(*key)
    return collectors[key].play_chunk(chunk)


def write_manifest(plan: CollectionPlan, out: Path) -> None:
    """Write the folder's content, and versions of simulator and code."""
    with closing(make_environment(plan.env)) as environment:
        simulator = environment.version()
    chunks = load_or_make_chunks(plan, out)
    done = [chunk for chunk in chunks if (out / chunk.file_name).exists()]
    lines = [line for chunk in done for _, line in read_lines(out / chunk.file_name)]
    files = (failures_file(out, chunk) for chunk in done)  # exists only for chunks with failures
    failed = [line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()]
    manifest = {
        "simulator": simulator,
        **checkout(),
        "chunks": {"asked": len(chunks), "done": len(done)},
        "episodes": len(lines),
        "transitions": sum(line.count('{"action":"') for line in lines),  # first steps have null
        "failed": failed,
    }
    write_json(out / MANIFEST, manifest)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("environment", help=f"simulator: {', '.join(ENVIRONMENTS)}; {', '.join(FRAME_ENVIRONMENTS)} and other frames")
    add("--split", required=True, help="split of the variations; for frames: train, dev or test")
    add("--policy", choices=POLICIES, help="policy; None: gold, for frames random")
    add("--episodes-per-task", type=positive, help="most episodes a task; gold plays a variation once; not for frames")
    add("--episodes", type=positive, help="number of episodes; for frames")
    add("--steps", type=positive, help="least number of transitions, in whole episodes; for frames")
    add("--plays", type=positive, help="episodes in a row of a variation; None: 1; not for frames")
    add("--tasks", nargs="+", default=[], help="tasks (default: all); not for frames")
    add("--max-steps", type=positive, help="most actions of an episode; None: 160, for frames no limit")
    add("--hidden-every", type=positive, help="steps from one hidden state to the next; None: 4; not for frames")
    add("--solutions", type=Path, metavar="FOLDER", help="cache of solutions; not for frames")
    add("--workers", type=positive, default=1, help="processes, each with a simulator; not for frames")
    add("--shard", default="1/1", metavar="I/N", help="part of the work, for several machines; not for frames")
    add("--dask", metavar="URL", help="scheduler of a Dask cluster, instead of --workers")
    add("--seed", type=int, default=0)
    add("--out", type=Path, required=True, help="folder of the episode files")


TEXT_ONLY: dict[str, Any] = {
    "episodes_per_task": None, "tasks": [], "hidden_every": None, "plays": None, "solutions": None, "workers": 1,
    "shard": "1/1", "dask": None,
}  # fmt: skip
"""Options that do not apply to frames, and their defaults."""


def run(args: argparse.Namespace, initializer: Callable[[], None] | None = None) -> None:
    """Collect. initializer: called in each worker process, such as to add a policy."""
    if is_frame_environment(args.environment):
        _run_frames(args)
    else:
        _run_text(args, initializer)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _run_frames(args: argparse.Namespace) -> None:
    from data_prep.collect_frames import FramePlan, run_frames

    for name, default in TEXT_ONLY.items():
        if getattr(args, name) != default:
            raise InputError(f"{_option(name)}: not an option for frames, which {args.environment} shows")
    if args.episodes is None and args.steps is None:
        raise InputError("--steps: must be given, or --episodes")
    plan = FramePlan(args.environment, args.split, args.seed, args.max_steps, args.policy or "random")
    run_frames(plan, args.out, args.episodes, args.steps)


def _run_text(args: argparse.Namespace, initializer: Callable[[], None] | None) -> None:
    for name in ("episodes", "steps"):
        if getattr(args, name) is not None:
            raise InputError(f"{_option(name)}: only for frames, use --episodes-per-task for {args.environment}")
    if args.episodes_per_task is None:
        raise InputError("--episodes-per-task: must be given")
    if args.policy not in (None, *POLICIES):
        raise InputError(f"--policy: must be one of {', '.join(POLICIES)} for {args.environment}, got {args.policy!r}")
    plan = CollectionPlan(
        env=args.environment, split=args.split, policy=args.policy or "gold", episodes_per_task=args.episodes_per_task,
        max_steps=args.max_steps or 160, seed=args.seed, tasks=tuple(sorted(args.tasks)),
        hidden_every=args.hidden_every or 4, plays=args.plays or 1,
    )  # fmt: skip
    shard = parse_shard(args.shard)
    if args.dask:
        workers: AbstractContextManager[Executor] = dask_executor(args.dask)
    elif args.workers == 1:  # needs no other process
        workers = ThreadPoolExecutor(1, initializer=initializer)
    else:
        workers = ProcessPoolExecutor(args.workers, get_context("spawn"), initializer)
    started = time.monotonic()
    with workers as executor:
        total = collect(plan, args.out, executor, shard, args.solutions)
    write_manifest(plan, args.out)
    seconds = time.monotonic() - started
    for failure in total.failures:
        print(f"failed: {failure}", file=sys.stderr)
    print(
        f"{args.out}: {total.episodes} episodes, {total.transitions} transitions in {seconds:.0f} s "
        f"({total.transitions / seconds:.1f}/s), {len(total.failures)} episodes failed"
    )
