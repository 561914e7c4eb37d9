"""Cost of STORM's imagination and training steps, as ratios to references.

    python -m lab.benchmarks.pixel_imagination

Imagined steps per second at the small MinAtar configurations: STORM in latents, TWISTED in frames, the simulator
itself. Sixteen imagined steps with a KV cache, and with the whole sequence run at each step. A training step. Weights
are untrained, which does not change the cost. Prints medians of this process's CPU time, rounds alternating.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.environments.pixels.by_name import make_frame_environment, make_frame_vector
from loopwm.pixel.agents.config import agent_config
from loopwm.pixel.imagined import EnvState, RandomPolicy, rollout
from loopwm.pixel.replay import Replay
from loopwm.pixel.storm.system import StormState, StormSystem, StormWorld
from loopwm.pixel.system import FrameBatch, make_system
from loopwm.records.config import read_sections
from loopwm.runtime import keep_everything

CONFIGS = Path(__file__).parents[2] / "configs"
GAME = "minatar/breakout"


def made(name: str, replay: Replay) -> Any:
    config = agent_config(read_sections(CONFIGS / f"{name}.yaml"))
    torch.manual_seed(0)
    system = make_system(config.of_system, config.model, config.objective, replay.space)
    system.prepare(torch.from_numpy(episode.obs) for episode in replay.episodes())
    return config, system


def imagine(world: Any, state: Any, steps: int, show: bool) -> None:
    generator, batch = torch.Generator().manual_seed(0), 128
    for _ in range(steps):
        outcome = world.step(state, torch.randint(world.space.actions, (batch,), generator=generator), generator)
        state = outcome.state
        _ = world.show(state) if show else world.features(state)


def imagine_uncached(world: StormWorld, start: StormState, context: Any, steps: int) -> None:
    """Imagine without a cache: every step runs all frames again."""
    generator, network = torch.Generator().manual_seed(0), world.network
    obs, action, first = context
    with torch.no_grad():
        z = world._posterior(obs[:, :-1], generator)
        e, state = network.mix(z, action), start
        for _ in range(steps):
            chosen = torch.randint(world.space.actions, (len(obs),), generator=generator)
            e = torch.cat((e, network.mix(state.z, chosen)[:, None]), 1)
            places = torch.arange(e.shape[1]).expand(len(obs), -1)
            h = network.run(e, places, torch.nn.functional.pad(first, (0, e.shape[1] - first.shape[1])), world.depth).h
            network.predict(h[:, -1])  # a step tells reward and end, too
            z = network.expect(h[:, -1], world._choose, generator)
            state = StormState(**{**vars(state), "z": z, "h": h[:, -1]})


def train(system: StormSystem, batch: FrameBatch) -> None:
    system.zero_grad()
    plan = system.plan(0, 0, range(len(batch.action)))
    system.loss(batch, plan, torch.Generator().manual_seed(0))[0].backward()


def medians(work: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, run in work.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(rounds[1:]) for name, rounds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_everything()  # as training does
    env, rng = make_frame_vector(GAME, 8), np.random.default_rng(0)
    replay = Replay(make_frame_environment(GAME).space, 10_000)
    replay.add_segments(rollout(env, RandomPolicy(3, rng), 200, EnvState.reset(env, 0)).segments, "random", 0)
    config, storm = made("storm-minatar-small", replay)
    _, twisted = made("twisted-agent-minatar-small", replay)
    storm.eval()
    segments = replay.sample(128, 8, rng)
    context = (
        torch.from_numpy(segments.obs),
        torch.from_numpy(segments.action[:, :-1]),
        torch.from_numpy(segments.first),
    )
    worlds = {"storm": storm.world(), "twisted": twisted.eval().world()}
    start = {name: world.start(*context, torch.Generator().manual_seed(0)) for name, world in worlds.items()}
    simulator = make_frame_environment(GAME)
    simulator.reset(seed=0)

    def simulate() -> None:
        for _ in range(500):
            if simulator.step(np.int64(rng.integers(3)))[2]:
                simulator.reset()

    batch = FrameBatch.of(replay.sample(config.world.rows, config.world.steps, rng))
    storm_trained = made("storm-minatar-small", replay)[1]
    times = medians(
        {
            "storm": lambda: imagine(worlds["storm"], start["storm"], 16, show=False),
            "storm, frames shown": lambda: imagine(worlds["storm"], start["storm"], 16, show=True),
            "storm, no cache": lambda: imagine_uncached(worlds["storm"], start["storm"], context, 16),
            "twisted": lambda: imagine(worlds["twisted"], start["twisted"], 2, show=True),
            "simulator": simulate,
            "training": lambda: train(storm_trained, batch),
        },
        args.rounds,
    )
    steps = {"storm": 128 * 16, "storm, frames shown": 128 * 16, "twisted": 128 * 2, "simulator": 500}
    rate = {name: count / times[name] for name, count in steps.items()}
    for name, value in rate.items():
        print(f"{name}: {value:.0f} steps a second")
    print(f"storm over twisted: {rate['storm'] / rate['twisted']:.1f}")
    print(f"storm over the simulator: {rate['storm'] / rate['simulator']:.2f}")
    print(f"16 steps, cached over uncached: {times['storm'] / times['storm, no cache']:.2f} of the time")
    print(f"training step: {1000 * times['training']:.0f} ms of processor time")


if __name__ == "__main__":
    main()
