"""Looping study: train agents by a protocol and compare the frames of their worlds in the same held-out play.

OUT/ARM/seed-N is a training run with `worlds.json`, what is right of each rollout and the settings they were
measured with; finished work is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from eval.scores.tables import table
from lab.pixels.open_loop import open_loop_rollouts
from lab.studies.differences import SeedDifference
from lab.studies.study_protocol import Arm, Protocol, check
from lab.studies.study_report import DIFFERENCE_HEADER, difference_cells
from loopwm.pixel.agents.config import AgentConfig, agent_config
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.gym import real_environments
from loopwm.pixel.imagined import EnvState, RandomPolicy, rollout
from loopwm.pixel.replay import Replay
from loopwm.pixel.system import PixelSystem
from loopwm.records.config import read_sections
from loopwm.records.errors import InputError
from loopwm.records.files import read_json, read_json_lines, sha256, write_atomic, write_json
from loopwm.records.provenance import provenance

Array = NDArray[np.float64]
GOAL = 0.9
"""Mean return that a run is to reach."""
LAST = 100
"""Episodes of a mean return."""
PLAYED = 10_000
"""Steps of each real environment. Rollouts are places of this play: in a shorter one they would overlap, and intervals
that take them for independent would be too narrow."""


@dataclass(frozen=True, kw_only=True)
class LoopingProtocol(Protocol):
    """Protocol: every arm is an agent, and worlds are compared on the same rollouts."""

    arms: dict[str, Arm]
    seed: int = 1000
    """Of the held-out play, in which actions are random."""
    rollouts: int = 2000
    context: int = 8
    """Frames before a rollout."""
    steps: int = 8
    """Imagined steps of a rollout."""
    column: Literal["exact", "cells"] = "exact"
    """What counts as right, of `open_loop.FRAMES`: denoised frames have no pixel of exactly the real value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.seed not in self.seeds, "seed", f"must not be a run's, whose play its world has seen: {self.seed}")
        for key in ("rollouts", "context", "steps"):
            check(getattr(self, key) > 0, key, f"must be above 0, got {getattr(self, key)}")

    def config(self, arm: str, seed: int, rate: float | None = None) -> Any:
        """Build an agent's configuration, which the other studies do not train."""
        config: AgentConfig = agent_config(read_sections(Path(self.base), self.overrides(arm, seed, rate)))
        check(config.has_world, "base", "must train a world")
        return config


@dataclass(frozen=True)
class ArmDifference(SeedDifference):
    """Difference reference - arm over the same rollouts."""

    reference: str
    arm: str


def run_looping_study(protocol: LoopingProtocol, out: Path) -> None:
    """Complete the study, then write results.json and report.md to `out`."""
    play = held_out(protocol)
    measured = {
        arm: [complete(protocol, arm, seed, out / arm / f"seed-{seed}", play) for seed in protocol.seeds]
        for arm in protocol.arms
    }
    results = {
        "study": "looping in pixels",
        "protocol": asdict(protocol),
        "arms": {
            arm: [{k: v for k, v in run.items() if k != "right"} for run in runs] for arm, runs in measured.items()
        },
        "right": {arm: [float(np.mean(run["right"])) for run in runs] for arm, runs in measured.items()},
        "differences": [asdict(difference) for difference in compare(protocol, measured)],
        "verdict": verdict(compare(protocol, measured)),
        "provenance": provenance("lab"),
    }
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(results, compare(protocol, measured)))


def held_out(protocol: LoopingProtocol) -> Replay:
    """Play at random, the same for all runs."""
    real = protocol.config(protocol.reference, protocol.seeds[0]).real
    env, space = real_environments(real.environment, real.count)
    policy = RandomPolicy(space.actions, np.random.default_rng(protocol.seed))
    replay = Replay(space, env.num_envs * PLAYED)
    replay.add_segments(
        rollout(env, policy, PLAYED, EnvState.reset(env, protocol.seed)).segments, "random", protocol.seed
    )
    return replay


def complete(protocol: LoopingProtocol, arm: str, seed: int, folder: Path, play: Replay) -> dict[str, Any]:
    """Train and measure a run; skip work already done with these settings. Raises InputError if training fails."""
    file = folder / "worlds.json"
    settings = {key: getattr(protocol, key) for key in ("seed", "rollouts", "context", "steps", "column")}
    settings |= {"base": protocol.base, "overrides": list(protocol.overrides(arm, seed))}
    # The base is a path, whose file may have been edited since.
    settings["config_sha256"] = sha256(json.dumps(asdict(protocol.config(arm, seed)), sort_keys=True, default=str))
    if file.is_file() and (record := read_json(file))["settings"] == settings:
        return record["measured"]
    command = [sys.executable, "-m", "loopwm.training", "--config", protocol.base, "--out", str(folder)]
    if status := subprocess.run([*command, *protocol.overrides(arm, seed)], check=False).returncode:
        raise InputError(f"{folder}: training ended with status {status}")
    measured = measure(protocol, protocol.config(arm, seed), folder, play)
    write_json(file, {"settings": settings, "measured": measured})
    return measured


def measure(protocol: LoopingProtocol, config: AgentConfig, folder: Path, play: Replay) -> dict[str, Any]:
    """Measure a finished run.

    Returns:
        `right`: mean of the protocol's column in each rollout; `parameters`, and `flops` of a step, of the world;
        `final_return` of the last episodes, and `reached`, the interactions at which GOAL was, or None
    """
    system = load_checkpoint(folder / "model")
    interactions, returns = mean_returns(folder / "metrics.jsonl")
    return {
        "right": right_shares(protocol, system.world(config.sampling), play).round(6).tolist(),
        "parameters": sum(p.numel() for p in system.parameters()),
        "flops": step_flops(system, config),
        "final_return": float(returns[-1]),
        "reached": int(interactions[(returns >= GOAL).argmax()]) if (returns >= GOAL).any() else None,
    }


def mean_returns(metrics: Path) -> tuple[NDArray[np.int64], Array]:
    """Return interactions, and the mean return of the LAST episodes then, from the first LAST episodes on.

    A record has the mean of the episodes that ended in its iteration, which counts once for each of them. Raises
    InputError for a run of fewer episodes.
    """
    records = [record for _, record in read_json_lines(metrics) if "return" in record]
    ended = np.diff([0, *(record["episodes"] for record in records)])
    values = np.repeat([record["return"] for record in records], ended)
    if len(values) < LAST:
        raise InputError(f"{metrics}: must have {LAST} episodes, got {len(values)}")
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return np.repeat([record["interactions"] for record in records], ended)[LAST - 1 :], (
        sums[LAST:] - sums[:-LAST]
    ) / LAST


def right_shares(protocol: LoopingProtocol, world: Any, play: Replay) -> Array:
    """Return the mean of the protocol's column over frames before the real end, by rollout: (rollouts,).

    A frame after an imagined end counts as wrong, so that all worlds are measured on the same frames.
    """
    rng = np.random.default_rng(protocol.seed)
    compared = open_loop_rollouts(
        world, play, protocol.rollouts, protocol.context, protocol.steps, rng, torch.device("cpu")
    )
    real, imagined = compared.real, compared.imagined
    counted = real["valid"] & ~real["end"]  # worlds are not trained on final frames
    right = imagined[protocol.column] * (imagined["valid"] & ~imagined["end"] & counted)
    some = counted.any(1)
    return right[some].sum(1) / counted[some].sum(1)


def step_flops(system: PixelSystem, config: AgentConfig) -> int:
    """Count the FLOPs of an imagined step of one world, at the default depth, after one frame."""
    world, generator = system.world(config.sampling), torch.Generator().manual_seed(0)
    obs = torch.zeros(1, 1, *system.space.frame_shape, dtype=torch.uint8)
    state = world.start(obs, torch.zeros(1, 0, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool), generator)
    with FlopCounterMode(display=False) as counter:
        world.step(state, torch.zeros(1, dtype=torch.int64), generator)
    return int(counter.get_total_flops())


def compare(protocol: LoopingProtocol, measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[ArmDifference]:
    """Compare the reference with every other arm."""
    right = {arm: np.array([run["right"] for run in runs]) for arm, runs in measured.items()}
    ours = right[protocol.reference]
    items = range(ours.shape[1])
    return [
        ArmDifference.of(ours, theirs, items, reference=protocol.reference, arm=arm)
        for arm, theirs in right.items()
        if arm != protocol.reference
    ]


def verdict(differences: Sequence[SeedDifference]) -> str:
    """Apply the bars of the protocol."""
    if all(d.counts and d.difference > 0 for d in differences):
        return "the loop pays"
    if any(d.counts and d.difference < 0 for d in differences):
        return "the loop does not pay"
    return "not resolved"


def render(results: Mapping[str, Any], differences: Sequence[ArmDifference]) -> str:
    """Render `report.md`."""
    protocol = results["protocol"]
    head = (
        f"# Study: looping in pixels\n\n{protocol['question']}\n\n{protocol['rollouts']} rollouts of "
        f"{protocol['steps']} steps; seeds {', '.join(map(str, protocol['seeds']))}. Verdict: {results['verdict']}.\n\n"
    )
    header = [
        "Arm",
        "parameters",
        "FLOPs of a step",
        f"{protocol['column']} by seed, %",
        "return by seed",
        "0.9 reached at",
    ]
    lines = [
        [
            arm,
            f"{runs[0]['parameters']:,}",
            f"{runs[0]['flops']:,}",
            ", ".join(f"{100 * share:.2f}" for share in results["right"][arm]),
            ", ".join(f"{run['final_return']:.2f}" for run in runs),
            ", ".join("never" if run["reached"] is None else f"{run['reached']:,}" for run in runs),
        ]
        for arm, runs in results["arms"].items()
    ]
    pairs = [[f"{d.reference} - {d.arm}", *difference_cells(d, "em")] for d in differences]
    return head + table(header, lines) + "\n\n" + table(["Right frames", "Points", *DIFFERENCE_HEADER], pairs) + "\n"
