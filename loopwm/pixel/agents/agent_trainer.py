"""Trainer of agents in a world model's imagination (TWISTED, appendix B.1), for any system and learner.

Each iteration has five steps:
    1. play the learner in the real environments and append the play to the replay
    2. update the learner on that play
    3. prepare the system for the new frames (TWISTED: the codebook grows)
    4. update the world model on segments of the replay
    5. after T_warmup, update the learner on worlds imagined from the replay

Departure: the paper grows the codebook by frames sampled from the replay; here each new frame is added once.

A run folder contains config.yaml, provenance.json, metrics.jsonl (a line per iteration), the replay, and checkpoints of
learner, model, prepared tensors, optimisers and random states. A resumed run continues from these with new real
episodes, since simulators cannot be saved.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.vector import TransformReward
from torch import nn
from tqdm import tqdm

from loopwm.pixel.agents.config import AgentConfig
from loopwm.pixel.agents.learner import Chance, Dream, Learner, Numbers, step_means
from loopwm.pixel.checkpoint import load_checkpoint, save_checkpoint
from loopwm.pixel.imagined import EnvState, FrameWorld, ImaginedVectorEnv, Rollout
from loopwm.pixel.program import seeded
from loopwm.pixel.registry import LEARNERS, named
from loopwm.pixel.replay import Replay, RewardUnit, prune, rewarded
from loopwm.pixel.system import FrameBatch, PixelSystem, make_system
from loopwm.records.errors import InputError
from loopwm.records.files import atomic_write, writing
from loopwm.records.frames import FrameSpace, episode_files, read_episode
from loopwm.records.run_folder import RunFolder, where_from
from loopwm.runtime import use_device

STATE, LEARNER = "state.pt", "learner.pt"
KEEP_CHECKPOINTS = 2
SHOWN = {"return": "return", "world_loss": "world", "real_entropy": "entropy", "imagined_reward": "imagined reward"}
"""Labels of the numbers on the progress bar."""


class WorldLearner:
    """World model and optimiser. Counts updates, so that depths and noise resume."""

    def __init__(self, config: AgentConfig, space: FrameSpace, device: torch.device) -> None:
        self.config, self.device = config, device
        self.system = initial_system(config, space).to(device)
        if config.world.steps < self.system.shortest:
            raise InputError(f"world.steps: must be at least {self.system.shortest}, got {config.world.steps}")
        rate, decay = config.world.learning_rate, config.world.weight_decay
        self.optimizer = torch.optim.AdamW(self.system.parameters(), rate, weight_decay=decay, fused=True)
        self.updates = 0

    def prepare(self, result: Rollout) -> Numbers:
        s = result.segments
        return self.system.prepare(torch.from_numpy(frames).to(self.device) for frames in (s.obs, s.next_obs))

    def update(self, replay: Replay, rng: np.random.Generator) -> Numbers:
        """Sample segments and take one optimiser step per minibatch."""
        world, seed = self.config.world, self.config.run.seed
        totals: Numbers = {}
        bounds = np.linspace(0, world.rows, world.minibatches + 1).astype(int)  # parts differ by a row at most
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            segments = replay.sample(stop - start, world.steps, rng, world.recency, self.system.reads_following)
            batch = FrameBatch.of(segments).to(self.device)
            # Depths are seeded by update and row, so they do not depend on the number of minibatches.
            plan = self.system.plan(seed, self.updates, range(start, stop))
            loss, measured = self.system.loss(batch, plan, seeded(self.device, seed, self.updates, start))
            if not loss.isfinite():  # before a checkpoint of it takes the place of a good one
                raise InputError(f"update {self.updates + 1}: loss is {loss.item()}; lower world.learning_rate")
            loss.backward()
            nn.utils.clip_grad_norm_(self.system.parameters(), world.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for name, (total, count) in measured.items():
                totals[name] = totals.get(name, 0.0) + (total / count).item() / world.minibatches
        self.updates += 1
        return totals

    def world(self) -> FrameWorld[Any]:
        return self.system.world(self.config.sampling)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.system.state_dict(),
            "prepared": self.system.prepared(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.system.load_state_dict(state["model"])
        self.system.take_prepared(state["prepared"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


def initial_system(config: AgentConfig, space: FrameSpace) -> PixelSystem:
    """Create the system, untrained or from `world.start_from`.

    Raises InputError for a checkpoint of another system, model, objective or space.
    """
    fresh = make_system(config.of_system, config.model, config.objective, space)
    if not config.world.start_from:
        return fresh
    folder = Path(config.world.start_from)
    trained = load_checkpoint(folder, config.of_system)
    trained.space.require(space, "real.environment")
    pairs = {"model": (fresh.config, trained.config), "objective": (fresh.objective, trained.objective)}
    for section, (ours, theirs) in pairs.items():
        for name, here in vars(ours).items():
            if here != (there := getattr(theirs, name)):
                raise InputError(f"{section}.{name}: must be {there!r} as in world.start_from {folder}, got {here!r}")
    return trained.train()


def in_unit(env: VectorEnv[Any, Any, Any], unit: RewardUnit) -> VectorEnv[Any, Any, Any]:
    """Convert the rewards of environments to this unit."""
    return env if unit == "raw" else TransformReward(env, np.sign)


class AgentTrainer:
    needs_world = True
    """Imagination needs a world model."""

    def __init__(self, config: AgentConfig, env: VectorEnv[Any, Any, Any], space: FrameSpace, folder: Path) -> None:
        """Create or resume a run in a folder. env: `config.real.count` real environments with this frame space.

        Raises InputError if the folder belongs to another configuration, or imagination lacks a world.
        """
        if self.needs_world and config.imagination.updates and not config.has_world:
            raise InputError("imagination.updates: requires a world; set world.updates or world.start_from")
        self.config, self.env, self.folder = config, in_unit(env, config.real.rewards), folder
        self.files = RunFolder(folder, "iteration", KEEP_CHECKPOINTS)
        torch.manual_seed(config.run.seed)  # initial weights
        self.chance, self.device = Chance.of(config.run.seed), use_device(config.run.device, "run.device")
        self.world = WorldLearner(config, space, self.device) if config.has_world else None
        width = self.world.system.width if self.world else 0
        self.learner: Learner = named(LEARNERS, config.learner, "learner")(config, space, width)
        self.learner.to(self.device)
        self.replay = Replay(space, config.world.replay)
        self.iteration, self.interactions, self.episodes = 0, 0, 0
        self.files.check(config)
        self.files.claim(config, where_from(config.run.seed, 1) | {"space": asdict(space)})
        (folder / "replay").mkdir(exist_ok=True)
        self._resume()
        self.learner.begin(config.real.count, self.chance, self.world.world() if self.world else None)
        # A resumed run begins new episodes, so their seed depends on the iteration.
        seed = int(np.random.default_rng((config.run.seed, self.iteration)).integers(2**31))
        self.env_state = EnvState.reset(self.env, seed)
        self._returns = np.zeros(config.real.count)

    def run(self, max_minutes: float | None = None) -> None:
        """Train until config.real.total interactions or `max_minutes`, then save."""
        started, real = time.monotonic(), self.config.real
        with tqdm(total=real.total, initial=self.interactions, unit="interaction") as bar:
            while self.interactions < real.total:
                if max_minutes is not None and time.monotonic() - started > 60 * max_minutes:
                    break
                record = self._iterate()
                bar.update(real.count * real.steps)
                bar.set_postfix_str(" ".join(f"{SHOWN[name]} {record[name]:.3g}" for name in SHOWN if name in record))
                self.files.log(self.iteration, record)
                if self.iteration % self.config.run.save_every == 0:
                    self._save()
        self._save()

    # -- the five steps ------------------------------------------------------------------------------------------

    def _iterate(self) -> Numbers:
        record = self._learn_from_real_play()
        if self.world is not None:
            started = time.monotonic()
            updates = range(self.config.world.updates if self.interactions > self.config.world.warmup else 0)
            record |= _means("world", [self.world.update(self.replay, self.chance.rng) for _ in updates])
            record["world_seconds"] = time.monotonic() - started
        if self.config.imagination.updates and self.interactions > self.config.imagination.warmup:
            started = time.monotonic()
            record |= _means("imagined", self._learn_from_imagination())
            record["imagined_seconds"] = time.monotonic() - started
        self.iteration += 1
        return record

    def _learn_from_real_play(self) -> Numbers:
        """Run steps 1 to 3."""
        real = self.config.real
        result = self.learner.play(self.env, real.steps, self.env_state)
        self.env_state = result.env_state
        self.interactions += result.segments.action.size
        self.replay.add_segments(result.segments, "agent", self.config.run.seed)
        record = self._episode_returns(result)
        update = self.learner.learn_from_play(real.epochs, real.minibatches, self.chance)
        record |= _means("real", [update | step_means(result)])
        return record if self.world is None or not self.config.world.updates else record | self.world.prepare(result)

    def _episode_returns(self, result: Rollout) -> Numbers:
        """Return the number of finished episodes and their mean return."""
        s, ended = result.segments, []
        for t in range(s.action.shape[1]):
            self._returns += s.reward[:, t]
            over = s.terminated[:, t] | s.truncated[:, t]
            ended += self._returns[over].tolist()
            self._returns[over] = 0
        self.episodes += len(ended)
        record: Numbers = {"interactions": self.interactions, "episodes": self.episodes}
        return record | ({"return": float(np.mean(ended))} if ended else {})

    def _learn_from_imagination(self) -> list[Numbers]:
        """Run step 5; each update uses new worlds."""
        c = self.config.imagination
        assert self.world is not None
        world = self.world.world()
        # One step beyond the rollout, so that unfinished worlds are not restarted at its end.
        env = ImaginedVectorEnv(world, self.replay, c.count, c.burn_in, horizon=c.steps + 1, device=self.device)
        dream = Dream(env, world, self.replay)
        return [self.learner.learn_from_imagination(dream, c, self.chance) for _ in range(c.updates)]

    # -- files -----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._export()  # a run that is stopped has agent and model of its last save
        if self.files.has(self.iteration):  # saved a moment ago, at `save_every`
            return
        folder = self.files.begin_checkpoint(self.iteration)
        folder.mkdir(parents=True)
        with writing(folder / STATE):
            torch.save(self.state_dict(), folder / STATE)
        self.files.finish_checkpoint(self.iteration)
        # Older checkpoints may need replay files that the newest one does not.
        states = [torch.load(path / STATE, weights_only=False) for path in self.files.checkpoints()]
        prune(self.folder / "replay", [state["replay"] for state in states])

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(),
            "world": self.world.state_dict() if self.world else None,
            "replay": self.replay.save(self.folder / "replay"),
            "rng": self.chance.rng.bit_generator.state,
            "generator": self.chance.generator.get_state(),
            "counts": (self.iteration, self.interactions, self.episodes),
        }

    def _resume(self) -> None:
        """Resume from the newest checkpoint; drop later metrics."""
        if checkpoints := self.files.checkpoints():
            state = torch.load(checkpoints[-1] / STATE, map_location="cpu", weights_only=False)
            self.learner.load_state_dict(state["learner"])
            if self.world is not None:
                self.world.load_state_dict(state["world"])
            self.replay = Replay.load(self.folder / "replay", state["replay"])
            self.chance.rng.bit_generator.state = state["rng"]
            self.chance.generator.set_state(state["generator"])
            self.iteration, self.interactions, self.episodes = state["counts"]
        elif self.config.world.demonstrations:
            self._add_demonstrations(Path(self.config.world.demonstrations))
        self.files.go_on_from(self.iteration)

    def _add_demonstrations(self, folder: Path) -> None:
        """Append demonstrations in streams after those of real play.

        An episode that did not end is the last of its stream (STORM, table 10). Raises InputError for a file of another
        environment, or a replay that is too small.
        """
        stream = self.config.real.count
        for path in episode_files(folder):
            episode = read_episode(path)
            self.replay.space.require(episode.space, str(path))
            if len(self.replay) + len(episode) > self.config.world.replay:
                raise InputError(f"world.replay: {self.config.world.replay} transitions are too few for {folder}")
            self.replay.add(rewarded(episode, self.config.real.rewards), stream)
            stream += int(episode.open)  # the next one must not continue it
            if self.world is not None and self.config.world.updates:
                self.world.system.prepare([torch.from_numpy(episode.obs).to(self.device)])

    def _export(self) -> None:
        """Export the learner as `learner.pt` and the world model as `model`."""
        with atomic_write(self.folder / LEARNER) as file:
            torch.save(self.learner.state_dict(), file)
        if self.world is not None:
            save_checkpoint(self.world.system, self.folder / "model")


def _means(prefix: str, records: list[Numbers]) -> Numbers:
    """Average the numbers of several updates, named `prefix_NAME`."""
    names = records[0] if records else ()
    return {f"{prefix}_{name}": sum(record[name] for record in records) / len(records) for name in names}
