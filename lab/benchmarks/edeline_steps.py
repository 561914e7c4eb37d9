"""Cost of EDELINE's training step and imagined frame, as ratios to references.

    python -m lab.benchmarks.edeline_steps

Uses the small configuration of the Memory mazes. A training step; an imagined frame of three denoising steps over one
U-Net pass, in one world, in 16, and in one of the paper's size; frames per second of one imagined world. Weights and
frames are random. Prints medians of this process's CPU time, one thread, rounds alternating.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from lab.benchmarks.pixel_imagination import medians
from loopwm.pixel.agents.config import agent_config
from loopwm.pixel.edeline.auxiliary_losses import to_signed
from loopwm.pixel.edeline.system import Edeline, EdelineWorld
from loopwm.pixel.system import FrameBatch
from loopwm.pixel.training_config import training_config
from loopwm.records.config import read_sections
from loopwm.records.frames import FrameSpace
from loopwm.runtime import keep_everything

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = training_config(read_sections(CONFIGS / "edeline-memory-small.yaml", ["data.train=made up"]))
PAPER = agent_config(read_sections(CONFIGS / "edeline-agent-memory.yaml"))
FRAMES = 20


def space(side: int) -> FrameSpace:
    return FrameSpace("made up", "1", (side, side, 3), 7)


def made_up(rows: int, steps: int, side: int = 32) -> FrameBatch:
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(256, (rows, steps + 1, side, side, 3), dtype=torch.uint8, generator=generator)
    none = torch.zeros(rows, steps, dtype=torch.bool)
    action = torch.randint(space(side).actions, (rows, steps), generator=generator)
    return FrameBatch(
        obs=frames[:, :-1], action=action, reward=torch.zeros(rows, steps), terminated=none, truncated=none,
        first=none.clone(), next_obs=frames[:, 1:],
    )  # fmt: skip


def train(system: Edeline, batch: FrameBatch) -> None:
    system.zero_grad()
    plan = system.plan(0, 0, range(len(batch.action)))
    system.loss(batch, plan, torch.Generator().manual_seed(0))[0].backward()


@torch.inference_mode()
def imagine(world: EdelineWorld, batch: FrameBatch) -> None:
    generator = torch.Generator().manual_seed(0)
    state = world.start(batch.obs[:, :5], batch.action[:, :4], batch.first[:, :5], generator)
    for step in range(FRAMES):
        state = world.step(state, batch.action[:, step], generator).state
        world.show(state)


@torch.inference_mode()
def draw(system: Edeline, batch: FrameBatch) -> None:
    before = to_signed(batch.obs[:, : system.config.frames])
    h = torch.zeros(len(before), system.config.memory.dim)
    for _ in range(FRAMES):
        system.denoised(before[:, 0], torch.ones(len(before)), before, h)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_everything()  # as training does
    torch.manual_seed(0)
    small = Edeline(SMALL.model, SMALL.objective, space(32))
    paper = Edeline(PAPER.model, PAPER.objective, space(64))
    worlds = {"one world": (small, made_up(1, 40)), "16 worlds": (small, made_up(16, 40))}
    worlds["one world of the paper's size"] = paper, made_up(1, 40, 64)
    work = {"training": partial(train, small, made_up(SMALL.batch.rows, SMALL.batch.steps))}
    for name, (system, batch) in worlds.items():
        work[f"imagined, {name}"] = partial(imagine, system.world(), batch)
        work[f"drawn, {name}"] = partial(draw, system, batch)
    times = medians(work, args.rounds)
    print(f"training step: {1000 * times['training']:.0f} ms")
    for name in worlds:
        ratio = times[f"imagined, {name}"] / times[f"drawn, {name}"]
        print(f"{name}: an imagined frame takes {ratio:.2f} times a pass of the U-Net")
    print(f"one world: {FRAMES / times['imagined, one world']:.0f} imagined frames a second")


if __name__ == "__main__":
    main()
