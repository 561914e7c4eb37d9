"""Operators of STORM's training and imagination, and times of the replay, before and after a change, in one run.

    python -m lab.benchmarks.pixel_costs --before COMMIT

At the sizes of `configs/storm-atari.yaml`, but with few rows, on which the counts do not depend. Operators are those
that torch dispatches on a CPU, without views and allocations: about the kernels that a GPU launches, but a norm is six
here and one there. --published counts a checkout of the authors' code (github.com/weipu-zhang/STORM; needs einops)
alike. Times are medians of this process's CPU time; rounds of both versions alternate.
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
ROWS, EPISODES, STEPS = 4, 10, 1000
VIEWS = frozenset(
    {"view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "permute"}
    | {"detach", "alias", "split", "split_with_sizes", "unbind", "as_strided", "_reshape_alias", "diagonal", "unfold"}
    | {"lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
    | {"_local_scalar_dense", "is_same_size"}
)
"""Operators that launch no kernel."""


class Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def operators(work: Callable[[], Any]) -> int:
    """Count the operators of a second call: the first creates the optimiser's state."""
    work()
    with Counter() as counter:
        work()
    return counter.count


def ours() -> dict[str, float]:
    from loopwm.pixel.agents.actor_critic import dream
    from loopwm.pixel.agents.actor_critic_learner import ActorCriticAgent
    from loopwm.pixel.agents.agent_trainer import WorldLearner
    from loopwm.pixel.agents.config import agent_config
    from loopwm.pixel.replay import Replay
    from loopwm.records.config import read_sections
    from loopwm.records.frames import FrameEpisode, FrameSpace

    torch.manual_seed(0)
    rng, chance = np.random.default_rng(0), torch.Generator().manual_seed(0)
    config = agent_config(read_sections(ROOT / "configs/storm-atari.yaml"))
    config = replace(config, world=replace(config.world, rows=ROWS))
    space, play = FrameSpace("any", "", (64, 64, 3), 6), Replay(FrameSpace("any", "", (64, 64, 3), 6), EPISODES * STEPS)
    ends = np.arange(STEPS) == STEPS - 1
    for _ in range(EPISODES):
        frames = rng.integers(256, size=(STEPS + 1, *space.frame_shape), dtype=np.uint8)
        reward = rng.normal(size=STEPS).astype(np.float32)
        play.add(FrameEpisode(space, frames, rng.integers(6, size=STEPS), reward, ends, ~ends & ends, 0, "random"))
    learner = WorldLearner(config, space, torch.device("cpu"))
    agent, world = ActorCriticAgent(config, space, learner.system.width), learner.world()
    segments = play.sample(ROWS, config.imagination.burn_in, rng)
    obs, action, first = map(torch.from_numpy, (segments.obs, segments.action[:, :-1], segments.first))

    def imagine() -> Any:
        state = world.start(obs, action, first, chance)
        return dream(world, agent.network, state, config.imagination.steps, chance)  # type: ignore[arg-type]

    experience = imagine()
    figures: dict[str, float] = {
        "world update": operators(lambda: learner.update(play, rng)),
        "imagination": operators(imagine),
        "agent update": operators(lambda: agent.learner.update(experience)),
    }
    # STORM needs no frames after the steps: leave them out where the version can.
    options: dict[str, Any] = {"following": False} if "following" in inspect.signature(play.sample).parameters else {}
    for count, length in ((config.imagination.count, config.imagination.burn_in), (16, config.world.steps)):
        times = []
        for _ in range(7):
            start = time.process_time()
            sampled = play.sample(count, length, rng, **options)
            times.append(1000 * (time.process_time() - start))
        figures[f"sample({count}, {length}), ms"] = median(times)
        figures[f"sample({count}, {length}), MiB"] = (sampled.obs.nbytes + sampled.next_obs.nbytes) / 2**20
    return figures


def published(folder: Path) -> dict[str, float]:
    """Count a checkout of the published code, at its own sizes, with stand-ins for what needs CUDA."""

    class Average:
        def __init__(self, decay: float) -> None:
            self.decay, self.value = decay, torch.tensor(0.0)

        def __call__(self, x: Any) -> Any:
            self.value = self.value * self.decay + x * (1 - self.decay)
            return self.value

    sys.modules["utils"] = types.ModuleType("utils")
    sys.modules["utils"].EMAScalar = Average  # type: ignore[attr-defined]
    sys.path.insert(0, str(folder))
    zeros = torch.zeros
    torch.zeros = lambda *a, **k: zeros(*a, **{**k, "device": "cpu"})
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    from agents import ActorCriticAgent  # type: ignore[import-not-found]
    from sub_models.world_models import WorldModel  # type: ignore[import-not-found]

    torch.manual_seed(0)
    world, agent = WorldModel(3, 6, 64, 512, 2, 8), ActorCriticAgent(1024 + 512, 2, 512, 6, 0.985, 0.95, 3e-4)
    world.tensor_dtype = torch.float32
    obs, action = torch.rand(ROWS, 64, 3, 64, 64), torch.randint(6, (ROWS, 64)).float()
    figures: dict[str, float] = {
        "world update": operators(lambda: world.update(obs, action, torch.randn(ROWS, 64), torch.zeros(ROWS, 64)))
    }
    world.eval()

    def imagine() -> Any:
        with torch.no_grad():
            return world.imagine_data(agent, obs[:, :8], action[:, :8], ROWS, 16, False, None)

    latent, taken, reward, ends = imagine()
    figures["imagination"] = operators(imagine)
    figures["agent update"] = operators(lambda: agent.update(latent, taken, None, None, reward, ends))
    return figures


def measured(version: Path, arguments: list[str]) -> dict[str, float]:
    """Run this file in a process that imports a version of the project."""
    command = [sys.executable, "-P", "-W", "ignore", __file__, "--one", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(version)}, check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--before", help="commit to compare with")
    parser.add_argument("--published", type=Path, help="checkout of the published code")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(1)
        print(json.dumps(published(args.published) if args.published else ours()))
        return
    with tempfile.TemporaryDirectory() as folder:
        versions: dict[str, tuple[Path, list[str]]] = {"now": (ROOT, [])}
        if args.before:
            archive = subprocess.run(["git", "archive", args.before], cwd=ROOT, check=True, stdout=subprocess.PIPE)
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(folder, filter="data")
            versions = {args.before: (Path(folder), [])} | versions
        if args.published:
            versions["published"] = (ROOT, ["--published", str(args.published)])
        results: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
        for _ in range(args.rounds):
            for name, version in versions.items():
                results[name].append(measured(*version))
    for name, rounds in results.items():
        figures = {key: median(each[key] for each in rounds) for key in rounds[0]}
        print(f"{name}: " + ", ".join(f"{key} {value:,.1f}".removesuffix(".0") for key, value in figures.items()))


if __name__ == "__main__":
    main()
