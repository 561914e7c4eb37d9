"""An agent that learns in TWISTED's imagination: the loop of five steps (TWISTED, appendix B.1).

    1. the policy plays in the real environments; the play goes into the replay
    2. the policy is updated on it
    3. the codebook grows by the patches of the new frames
    4. the world model is updated on segments of the replay
    5. after T_warmup, the policy is updated on worlds imagined from places of the replay

Departure: the paper grows the codebook by frames sampled from the replay, here each new frame is looked at once.

A run folder holds config.yaml, provenance.json, metrics.jsonl (a line an iteration), the replay, and checkpoints of
everything that goes on: policy, model, codebook, optimisers, target scale and random states. A resumed run goes on with
freshly begun real episodes, since simulators cannot be saved; all else is as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn
from tqdm import tqdm

from loopwm.core import DepthPlan
from loopwm.pixel.acting import Player, play
from loopwm.pixel.imagined import ImaginedVectorEnv, Moment, Rollout
from loopwm.pixel.policy import ActorCritic
from loopwm.pixel.ppo import PPO
from loopwm.pixel.replay import Replay, prune
from loopwm.pixel.twisted.agent_config import AgentConfig
from loopwm.pixel.twisted.checkpoint import TwistedCheckpoint, TwistedWorld
from loopwm.pixel.twisted.codebook import Growth, PatchTokenizer
from loopwm.pixel.twisted.model import Twisted, TwistedCoefficients, TwistedObjective
from loopwm.pixel.twisted.training import tokenized
from loopwm.records.errors import InputError
from loopwm.records.files import atomic_write
from loopwm.records.frames import FrameSpace
from loopwm.records.run_folder import RunFolder, where_from

STATE = "state.pt"
KEPT = 2
"""Checkpoints."""

Numbers = dict[str, float]


class WorldLearner:
    """The world model with its codebook and optimiser. Steps are counted, so that depths and noise resume."""

    def __init__(self, config: AgentConfig, space: FrameSpace) -> None:
        self.config, world = config, config.world
        try:
            height, width = world.patch
            self.tokenizer = PatchTokenizer(space.frame_shape, (height, width), config.model.codes, world.threshold)
        except ValueError as error:
            raise InputError(f"world.patch: {error}") from error
        self.model = Twisted(config.model, self.tokenizer.grid, space.actions)
        coefficients = TwistedCoefficients(config.objective.reward_coef, config.objective.done_coef)
        self.objective = TwistedObjective(self.model, coefficients)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=world.learning_rate)
        self.space, self.updates = space, 0

    def grow(self, frames: np.ndarray[Any, Any]) -> Growth:
        return self.tokenizer.grow(torch.from_numpy(frames))

    def update(self, replay: Replay, rng: np.random.Generator) -> Numbers:
        """One optimiser step on freshly drawn segments, in parts."""
        world, model = self.config.world, self.config.model
        totals: Numbers = {}
        bounds = np.linspace(0, world.rows, world.minibatches + 1).astype(int)
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            batch = tokenized(self.tokenizer, replay.sample(stop - start, world.steps, rng))
            plan = DepthPlan.sample(
                self.config.run.seed, self.updates, range(start, stop), model.mu_rec, model.max_loops
            )
            loss, measured = self.objective(batch, plan)
            (loss * (stop - start) / world.rows).backward()
            for name, (total, count) in measured.items():
                totals[name] = totals.get(name, 0.0) + (total / count).item() / world.minibatches
        nn.utils.clip_grad_norm_(self.model.parameters(), world.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        return totals

    def checkpoint(self) -> TwistedCheckpoint:
        return TwistedCheckpoint(self.model, self.tokenizer, self.space)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "tokenizer": self.tokenizer.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.tokenizer.load_state_dict(state["tokenizer"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


class AgentTrainer:
    """The five steps, again and again, in a run folder."""

    def __init__(self, config: AgentConfig, env: VectorEnv[Any, Any, Any], space: FrameSpace, folder: Path) -> None:
        """env: `config.real.count` real environments of this space. Raises InputError for a folder of another
        configuration."""
        self.config, self.env, self.folder = config, env, folder
        self.files = RunFolder(folder, "iteration", KEPT)
        torch.manual_seed(config.run.seed)
        self.rng = np.random.default_rng(config.run.seed)
        self.generator = torch.Generator().manual_seed(config.run.seed)
        self.world = WorldLearner(config, space) if config.world.updates else None
        policy = ActorCritic(config.policy, space.frame_shape, space.actions)
        self.learner = PPO(policy, config.ppo)
        self.replay = Replay(space, config.world.replay)
        self.iteration, self.interactions, self.episodes = 0, 0, 0
        self._prepare_folder()
        self._resume()
        self.player = Player(policy, config.real.count, self.generator)
        self.moment = self._begin()
        self._returns = np.zeros(config.real.count)

    def _begin(self) -> Moment:
        """Fresh real episodes, seeded by the run and how far it is."""
        seed = int(np.random.default_rng((self.config.run.seed, self.iteration)).integers(2**31))
        return Moment.begin(self.env, seed)

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
            record |= _means(
                "world", [self.world.update(self.replay, self.rng) for _ in range(self.config.world.updates)]
            )
            record["world_seconds"] = time.monotonic() - started
            if self.interactions > self.config.imagination.warmup:
                started = time.monotonic()
                record |= _means("imagined", list(self._learn_from_imagination(self.world)))
                record["imagined_seconds"] = time.monotonic() - started
        self.iteration += 1
        return record

    def _learn_from_real_play(self) -> Numbers:
        """Steps 1 to 3."""
        real, seed = self.config.real, self.config.run.seed
        data, found = play(self.env, self.player, real.steps, self.moment)
        self.moment = found.moment
        self.interactions += found.segments.action.size
        self.replay.add_segments(found.segments, "agent", seed)
        record = self._tell_episodes(found)
        update = self.learner.update(data, real.epochs, real.minibatches, self.generator)
        record |= _means("real", [update | _a_step(found)])
        if self.world is not None:
            for frames in (found.segments.obs, found.segments.next_obs):
                growth = self.world.grow(frames)
                record["patches_refused"] = record.get("patches_refused", 0.0) + growth.refused
            record["codes"] = self.world.tokenizer.size
        return record

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

    def _learn_from_imagination(self, world: WorldLearner) -> list[Numbers]:
        """Step 5: each update is one rollout of fresh worlds."""
        c = self.config.imagination
        region = c.centre.region(world.tokenizer.grid)
        imagination = TwistedWorld(world.checkpoint(), c.decoder.decoder(world.tokenizer.grid, region))
        # One step more than is played: worlds that go on need not be begun anew at the end.
        env = ImaginedVectorEnv(imagination, self.replay, c.count, c.burn_in, horizon=c.steps + 1)
        learner = self.learner
        real_config, learner.config = learner.config, replace(learner.config, entropy_coef=c.entropy_coef)
        numbers = []
        for _ in range(c.updates):
            begun = Moment.begin(env, int(self.rng.integers(2**31)))
            data, found = play(env, Player(learner.policy, c.count, self.generator), c.steps, begun)
            update = learner.update(data, c.epochs, c.minibatches, self.generator)
            numbers.append(update | _a_step(found))
        learner.config = real_config
        return numbers

    # -- what lies on disk ---------------------------------------------------------------------------------------

    def _prepare_folder(self) -> None:
        self.files.check(self.config)
        self.files.claim(self.config, where_from(self.config.run.seed, 1) | {"space": asdict(self.replay.space)})
        (self.folder / "replay").mkdir(exist_ok=True)

    def _save(self) -> None:
        if self.files.has(self.iteration):
            return
        folder = self.files.begin_checkpoint(self.iteration)
        folder.mkdir(parents=True)
        torch.save(self.state_dict(), folder / STATE)
        self.files.finish_checkpoint(self.iteration)
        states = [torch.load(path / STATE, weights_only=False)["replay"] for path in self.files.checkpoints()]
        prune(self.folder / "replay", states)

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.learner.policy.state_dict(),
            "policy_optimizer": self.learner.optimizer.state_dict(),
            "scale": self.learner.scale.state_dict(),
            "world": self.world.state_dict() if self.world else None,
            "replay": self.replay.save(self.folder / "replay"),
            "rng": self.rng.bit_generator.state,
            "generator": self.generator.get_state(),
            "counts": (self.iteration, self.interactions, self.episodes),
        }

    def _resume(self) -> None:
        """Continues from the newest checkpoint; metrics written after it are dropped."""
        if checkpoints := self.files.checkpoints():
            state = torch.load(checkpoints[-1] / STATE, weights_only=False)
            self.learner.policy.load_state_dict(state["policy"])
            self.learner.optimizer.load_state_dict(state["policy_optimizer"])
            self.learner.scale.load_state_dict(state["scale"])
            if self.world is not None:
                self.world.load_state_dict(state["world"])
            self.replay = Replay.load(self.folder / "replay", state["replay"])
            self.rng.bit_generator.state = state["rng"]
            self.generator.set_state(state["generator"])
            self.iteration, self.interactions, self.episodes = state["counts"]
        self.files.go_on_from(self.iteration)

    def _export(self) -> None:
        """`policy.pt`, and the world model in `model`."""
        with atomic_write(self.folder / "policy.pt") as file:
            torch.save(self.learner.policy.state_dict(), file)
        if self.world is not None:
            self.world.checkpoint().save(self.folder / "model")


def _a_step(found: Rollout) -> Numbers:
    """Reward of a step in the mean, and how many end an episode: where imagination differs from the real environment,
    policies learn what does not hold."""
    s = found.segments
    return {"reward": float(s.reward.mean()), "ends": float(s.terminated.mean())}


def _means(prefix: str, records: list[Numbers]) -> Numbers:
    """Means of the numbers of several updates, named `prefix_NAME`."""
    names = records[0] if records else ()
    return {f"{prefix}_{name}": sum(record[name] for record in records) / len(records) for name in names}


def _summary(record: Mapping[str, float]) -> str:
    shown = {"return": "return", "world_loss": "world", "real_entropy": "entropy", "imagined_reward": "imagined reward"}
    return " ".join(f"{label} {record[name]:.3g}" for name, label in shown.items() if name in record)
