"""An agent that learns in a world model's imagination: the loop of five steps (TWISTED, appendix B.1), for any system
and any learner.

    1. the learner plays in the real environments; the play goes into the replay
    2. it learns from that
    3. the system is prepared for the new frames (TWISTED: the codebook grows)
    4. the world model is updated on segments of the replay
    5. after T_warmup, and when the world can be trusted, the learner is updated on worlds imagined from places of the
       replay, or, with an oracle, on more of the simulator itself

Departure: the paper grows the codebook by frames sampled from the replay, here each new frame is looked at once.

A run folder holds config.yaml, provenance.json, metrics.jsonl (a line an iteration), the replay, and checkpoints of
everything that goes on: learner, model, what was prepared, optimisers and random states. A resumed run goes on with
freshly begun real episodes, since simulators cannot be saved; all else is as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn
from tqdm import tqdm

from loopwm.machine import use_device
from loopwm.pixel.agents.config import AgentConfig
from loopwm.pixel.agents.learner import Chance, Dream, Learner, Numbers, a_step
from loopwm.pixel.agents.simulator_world import Oracle, in_unit
from loopwm.pixel.agents.validation_gate import open_loop_rollouts
from loopwm.pixel.checkpoint import load_checkpoint, save_checkpoint
from loopwm.pixel.imagined import EnvState, FrameWorld, ImaginedVectorEnv, Rollout
from loopwm.pixel.program import seeded
from loopwm.pixel.registry import LEARNERS, named
from loopwm.pixel.replay import Replay, Segments, prune, rewarded
from loopwm.pixel.system import FrameBatch, PixelSystem, make_system
from loopwm.records.errors import InputError
from loopwm.records.files import atomic_write
from loopwm.records.frames import FrameSpace, episode_files, read_episode
from loopwm.records.run_folder import RunFolder, where_from

STATE, LEARNER, HELD_OUT = "state.pt", "learner.pt", "held-out"
KEPT = 2
"""Checkpoints."""


class WorldLearner:
    """The world model and its optimiser. Steps are counted, so that depths and noise resume."""

    def __init__(self, config: AgentConfig, space: FrameSpace, device: torch.device) -> None:
        self.config, self.device = config, device
        self.system = begun(config, space).to(device)
        if config.world.steps < self.system.shortest:
            raise InputError(f"world.steps: {config.world.steps} are fewer than {self.system.shortest}")
        self.optimizer = torch.optim.AdamW(
            self.system.parameters(), lr=config.world.learning_rate, weight_decay=config.world.weight_decay
        )
        self.updates = 0

    def prepare(self, found: Rollout) -> Numbers:
        s = found.segments
        return self.system.prepare(torch.from_numpy(frames).to(self.device) for frames in (s.obs, s.next_obs))

    def update(self, replay: Replay, rng: np.random.Generator) -> Numbers:
        """Freshly drawn segments, an optimiser step for each part of them."""
        world, seed = self.config.world, self.config.run.seed
        totals: Numbers = {}
        bounds = np.linspace(0, world.rows, world.minibatches + 1).astype(int)
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            batch = FrameBatch.of(replay.sample(stop - start, world.steps, rng, world.recency)).to(self.device)
            plan = self.system.plan(seed, self.updates, range(start, stop))
            loss, measured = self.system.loss(batch, plan, seeded(self.device, seed, self.updates, start))
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


def begun(config: AgentConfig, space: FrameSpace) -> PixelSystem:
    """The system untrained, or as `world.start_from` has it.

    Raises InputError for a checkpoint of another system, model, objective or space.
    """
    fresh = make_system(config.of_system, config.model, config.objective, space)
    if not config.world.start_from:
        return fresh
    folder = Path(config.world.start_from)
    trained = load_checkpoint(folder, config.of_system)
    trained.space.require(space, "real.environment")
    for section, ours, theirs in (
        ("model", fresh.config, trained.config),
        ("objective", fresh.objective, trained.objective),
    ):
        require_same(section, ours, theirs, folder)
    return trained.train()


def require_same(section: str, ours: Any, theirs: Any, folder: Path) -> None:
    """Raises InputError naming the first key of two sections of configuration that differs."""
    for field in fields(ours):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here != there:
            raise InputError(f"{section}.{field.name}: {here!r}, but {folder}, world.start_from, has {there!r}")


class AgentTrainer:
    """The five steps, again and again, in a run folder."""

    def __init__(
        self,
        config: AgentConfig,
        env: VectorEnv[Any, Any, Any],
        space: FrameSpace,
        folder: Path,
        oracle: VectorEnv[Any, Any, Any] | None = None,
    ) -> None:
        """env: `config.real.count` real environments of this space; oracle: `config.imagination.count` more, to imagine
        in in the place of a world. Raises InputError for a folder of another configuration."""
        unit = config.real.rewards
        self.oracle = None if oracle is None else Oracle(in_unit(oracle, unit), config.imagination.burn_in)
        self.config, self.env, self.folder = config, in_unit(env, unit), folder
        self.files = RunFolder(folder, "iteration", KEPT)
        torch.manual_seed(config.run.seed)
        self.chance, self.device = Chance.of(config.run.seed), use_device(config.run.device, "run.device")
        self.world = WorldLearner(config, space, self.device) if config.has_world else None
        width = self.world.system.width if self.world else 0
        self.learner: Learner = named(LEARNERS, config.learner, "learner")(config, space, width)
        self.learner.to(self.device)
        self.replay, self.held_out = Replay(space, config.world.replay), Replay(space, config.world.replay)
        self.has_gate = config.imagination.validation_gate.enabled and self.world is not None and self.oracle is None
        self.gate_open = not self.has_gate
        self.iteration, self.interactions, self.episodes = 0, 0, 0
        self._prepare_folder()
        self._resume()
        self.learner.begin(config.real.count, self.chance, self.world.world() if self.world else None)
        self.env_state = self._begin()
        self._returns = np.zeros(config.real.count)

    def _begin(self) -> EnvState:
        """Fresh real episodes, seeded by the run and how far it is."""
        seed = int(np.random.default_rng((self.config.run.seed, self.iteration)).integers(2**31))
        return EnvState.reset(self.env, seed)

    def run(self, max_minutes: float | None = None) -> None:
        """Plays until config.real.total interactions, or until `max_minutes` have passed, then saves and exports."""
        started, real = time.monotonic(), self.config.real
        with tqdm(total=real.total, initial=self.interactions, unit="interaction") as bar:
            while self.interactions < real.total:
                if max_minutes is not None and time.monotonic() - started > 60 * max_minutes:
                    break
                record = self._iterate()
                bar.update(real.count * real.steps)
                bar.set_postfix_str(_summary(record))
                self.files.log(self.iteration, record)
                if self.iteration % self.config.run.save_every == 0:
                    self._save()
        self._save()
        self._export()

    # -- the five steps ------------------------------------------------------------------------------------------

    def _iterate(self) -> Numbers:
        record = self._learn_from_real_play()
        if self.world is not None:
            started = time.monotonic()
            updates = range(self.config.world.updates if self.interactions > self.config.world.warmup else 0)
            record |= _means("world", [self.world.update(self.replay, self.chance.rng) for _ in updates])
            record["world_seconds"] = time.monotonic() - started
        if self.config.imagination.updates and self.interactions > self.config.imagination.warmup:
            record |= self._look_at_the_world()
            if self.gate_open:
                started = time.monotonic()
                record |= _means("imagined", self._learn_from_imagination())
                record["imagined_seconds"] = time.monotonic() - started
        self.iteration += 1
        return record

    def _learn_from_real_play(self) -> Numbers:
        """Steps 1 to 3."""
        real = self.config.real
        found = self.learner.play(self.env, real.steps, self.env_state)
        self.env_state = found.env_state
        self.interactions += found.segments.action.size
        self._keep(found.segments)
        record = self._tell_episodes(found)
        update = self.learner.learn_from_play(real.epochs, real.minibatches, self.chance)
        record |= _means("real", [update | a_step(found)])
        return record if self.world is None else record | self.world.prepare(found)

    def _tell_episodes(self, found: Rollout) -> Numbers:
        """Returns of the episodes that ended, and how many there were."""
        s, ended = found.segments, []
        for t in range(s.action.shape[1]):
            self._returns += s.reward[:, t]
            over = s.terminated[:, t] | s.truncated[:, t]
            ended += self._returns[over].tolist()
            self._returns[over] = 0
        self.episodes += len(ended)
        record: Numbers = {"interactions": self.interactions, "episodes": self.episodes}
        return record | ({"return": float(np.mean(ended))} if ended else {})

    def _keep(self, played: Segments) -> None:
        """Into the replay; where trust is asked, the play of the last environment aside."""
        if not self.has_gate:
            self.replay.add_segments(played, "agent", self.config.run.seed)
            return
        rows = len(played.action) - 1
        self.replay.add_segments(played.rows(slice(rows)), "agent", self.config.run.seed)
        self.held_out.add_segments(played.rows(slice(rows, None)), "agent", self.config.run.seed)

    def _look_at_the_world(self) -> Numbers:
        """Whether the world may be learned in from now on, where that is asked; once trusted, it stays so."""
        c, gate = self.config.imagination, self.config.imagination.validation_gate
        if not self.has_gate or self.world is None or self.iteration % gate.every:
            return {}
        made = (gate.rollouts, c.burn_in, gate.steps, self.chance.rng, self.device)
        found = open_loop_rollouts(self.world.world(), self.held_out, *made).overall()
        self.gate_open = self.gate_open or gate.passed(found["ends"], found["objects"])
        return {f"gate_{name}": number for name, number in found.items()} | {"gate_open": float(self.gate_open)}

    def _learn_from_imagination(self) -> list[Numbers]:
        """Step 5: each update is on fresh worlds."""
        c = self.config.imagination
        if self.oracle is not None:
            dream = Dream(self.oracle, None, self.replay)
            return [self.learner.learn_from_imagination(dream, c, self.chance) for _ in range(c.updates)]
        assert self.world is not None
        world = self.world.world()
        # One step more than is played: worlds that go on need not be begun anew at the end.
        env = ImaginedVectorEnv(world, self.replay, c.count, c.burn_in, horizon=c.steps + 1, device=self.device)
        dream = Dream(env, world, self.replay)
        return [self.learner.learn_from_imagination(dream, c, self.chance) for _ in range(c.updates)]

    # -- what lies on disk ---------------------------------------------------------------------------------------

    def _prepare_folder(self) -> None:
        self.files.check(self.config)
        self.files.claim(self.config, where_from(self.config.run.seed, 1) | {"space": asdict(self.replay.space)})
        (self.folder / "replay").mkdir(exist_ok=True)
        (self.folder / HELD_OUT).mkdir(exist_ok=True)

    def _save(self) -> None:
        if self.files.has(self.iteration):
            return
        folder = self.files.begin_checkpoint(self.iteration)
        folder.mkdir(parents=True)
        torch.save(self.state_dict(), folder / STATE)
        self.files.finish_checkpoint(self.iteration)
        states = [torch.load(path / STATE, weights_only=False) for path in self.files.checkpoints()]
        prune(self.folder / "replay", [state["replay"] for state in states])

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(),
            "world": self.world.state_dict() if self.world else None,
            "replay": self.replay.save(self.folder / "replay"),
            "held_out": self.held_out.save(self.folder / HELD_OUT),
            "trusted": self.gate_open,
            "rng": self.chance.rng.bit_generator.state,
            "generator": self.chance.generator.get_state(),
            "counts": (self.iteration, self.interactions, self.episodes),
        }

    def _resume(self) -> None:
        """Continues from the newest checkpoint; metrics written after it are dropped."""
        if checkpoints := self.files.checkpoints():
            state = torch.load(checkpoints[-1] / STATE, map_location="cpu", weights_only=False)
            self.learner.load_state_dict(state["learner"])
            if self.world is not None:
                self.world.load_state_dict(state["world"])
            self.replay = Replay.load(self.folder / "replay", state["replay"])
            self.held_out = Replay.load(self.folder / HELD_OUT, state["held_out"])
            self.gate_open = state["trusted"]
            self.chance.rng.bit_generator.state = state["rng"]
            self.chance.generator.set_state(state["generator"])
            self.iteration, self.interactions, self.episodes = state["counts"]
        elif self.config.world.demonstrations:
            self._take_demonstrations(Path(self.config.world.demonstrations))
        self.files.go_on_from(self.iteration)

    def _take_demonstrations(self, folder: Path) -> None:
        """One behind the other, in streams behind those of real play: a fresh one where an episode did not end (STORM,
        table 10). Raises InputError for a file of another environment, and for more than the replay keeps."""
        stream = self.config.real.count
        for path in episode_files(folder):
            episode = read_episode(path)
            self.replay.space.require(episode.space, str(path))
            if len(self.replay) + len(episode) > self.config.world.replay:
                raise InputError(f"world.replay: {self.config.world.replay} transitions do not hold those of {folder}")
            self.replay.add(rewarded(episode, self.config.real.rewards), stream)
            stream += int(episode.open)
            if self.world is not None:
                self.world.system.prepare([torch.from_numpy(episode.obs).to(self.device)])

    def _export(self) -> None:
        """`learner.pt`, and the world model in `model`."""
        with atomic_write(self.folder / LEARNER) as file:
            torch.save(self.learner.state_dict(), file)
        if self.world is not None:
            save_checkpoint(self.world.system, self.folder / "model")


def _means(prefix: str, records: list[Numbers]) -> Numbers:
    """Means of the numbers of several updates, named `prefix_NAME`."""
    names = records[0] if records else ()
    return {f"{prefix}_{name}": sum(record[name] for record in records) / len(records) for name in names}


def _summary(record: Mapping[str, float]) -> str:
    shown = {"return": "return", "world_loss": "world", "real_entropy": "entropy", "imagined_reward": "imagined reward"}
    return " ".join(f"{label} {record[name]:.3g}" for name, label in shown.items() if name in record)
