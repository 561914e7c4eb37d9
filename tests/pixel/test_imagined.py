"""The imagined vector environment against gymnasium's own, both with the same small deterministic game."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from loopwm.pixel.imagined import EnvState, Imagined, ImaginedVectorEnv, RandomPolicy, rollout
from loopwm.pixel.replay import Replay, Segments
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace
from tests.pixel.made_up import SPACE, make_episode

ENVS, CONTEXT, HORIZON = 5, 3, 6
GAME = replace(SPACE, env="game", actions=3)


def play(number: int, action: int) -> tuple[int, float, bool]:
    """The game: where an action leads from a number, its reward, and whether that is the end."""
    following = (3 * number + action + 1) % 100
    return following, following / 10, following % 7 == 0


class RealGame(gymnasium.Env[Any, Any]):
    """The game as a real environment; episodes start at the given numbers."""

    def __init__(self, starts: Iterable[int]) -> None:
        self.observation_space = spaces.Box(0, 255, GAME.frame_shape, np.uint8)
        self.action_space = spaces.Discrete(GAME.actions)
        self._starts = deque(starts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._number, self._age = self._starts.popleft(), 0
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._number, reward, over = play(self._number, int(action))
        self._age += 1
        return self._frame(), reward, over, not over and self._age == HORIZON, {}

    def _frame(self) -> Any:
        return np.full(GAME.frame_shape, self._number, np.uint8)


@dataclass
class GameWorld:
    """The game as a world model; a state is a list of numbers. Counts its calls, and keeps what it started from."""

    space: FrameSpace = GAME
    steps: int = 0

    def __post_init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> list[int]:
        self.seen.append((obs, action, first))
        return obs[:, -1, 0, 0, 0].tolist()

    def step(self, state: list[int], action: Tensor, generator: torch.Generator) -> Imagined[list[int]]:
        self.steps += 1
        numbers, reward, over = zip(*map(play, state, action.tolist()), strict=True)
        return Imagined(torch.tensor(reward), torch.tensor(over), list(numbers))

    def observe(
        self, state: list[int], action: Tensor, obs: Tensor, first: Tensor, generator: torch.Generator
    ) -> list[int]:
        return obs[:, 0, 0, 0].tolist()

    def show(self, state: list[int]) -> Tensor:
        return torch.tensor(state, dtype=torch.uint8)[:, None, None, None].expand(-1, *self.space.frame_shape)

    def replace(self, state: list[int], rows: Tensor, fresh: list[int]) -> list[int]:
        merged = dict(enumerate(state)) | dict(zip(rows.tolist(), fresh, strict=True))
        return [merged[row] for row in range(len(state))]


class DrawingWorld(GameWorld):
    """Adds a number drawn with the generator to the reward."""

    def step(self, state: list[int], action: Tensor, generator: torch.Generator) -> Imagined[list[int]]:
        found = super().step(state, action, generator)
        return replace(found, reward=found.reward + torch.rand(len(state), generator=generator))


def make_replay(space: FrameSpace = GAME) -> Replay:
    """Frames of 1 to 60 in three episodes; whatever was played there."""
    replay = Replay(space, 1000)
    for start in (1, 21, 41):
        numbers = make_episode(start, 20, space=replace(space, actions=200))
        replay.add(replace(numbers, space=space, action=numbers.action % space.actions))
    return replay


def make_env(world: GameWorld | None = None) -> ImaginedVectorEnv[list[int]]:
    return ImaginedVectorEnv(world or GameWorld(), make_replay(), ENVS, CONTEXT, HORIZON)


def equal(a: Segments, b: Segments) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in Segments.__dataclass_fields__)


def played(env: Any, steps: int = 60, seed: int = 0) -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(7)
    begun = env.reset(seed=seed)
    return begun, [env.step(rng.integers(GAME.actions, size=ENVS)) for _ in range(steps)]


def test_it_does_what_gymnasiums_own_vector_does() -> None:
    (obs, _), steps = played(make_env())
    starts = [[int(obs[i, 0, 0, 0])] for i in range(ENVS)]
    for obs, _, terminated, truncated, _ in steps:
        for i in np.flatnonzero(terminated | truncated):
            starts[i].append(int(obs[i, 0, 0, 0]))
    real = SyncVectorEnv([lambda i=i: RealGame(starts[i]) for i in range(ENVS)], autoreset_mode=AutoresetMode.SAME_STEP)
    _, expected = played(real)
    ends = Counter()
    for ours, theirs in zip(steps, expected, strict=True):
        for mine, other in zip(ours[:4], theirs[:4], strict=True):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
            assert np.allclose(mine, other)
        ours_info = {name: value for name, value in ours[4].items() if "context" not in name}
        assert ours_info.keys() == theirs[4].keys()
        if ours_info:
            assert np.array_equal(ours_info["_final_obs"], theirs[4]["_final_obs"])
            assert np.array_equal(ours_info["_final_info"], theirs[4]["_final_info"])
            for mine, other in zip(ours_info["final_obs"], theirs[4]["final_obs"], strict=True):
                assert np.array_equal(mine, other)
        ends.update(terminated=int(ours[2].sum()), truncated=int(ours[3].sum()))
    assert min(ends.values()) > 5
    assert make_env().metadata["autoreset_mode"] is real.metadata["autoreset_mode"]
    assert make_env().action_space == real.action_space
    assert make_env().observation_space == real.observation_space


def test_a_vector_step_is_one_step_of_the_world() -> None:
    world = GameWorld()
    _, steps = played(make_env(world))
    assert world.steps == len(steps)


def test_worlds_start_where_a_segment_of_the_replay_ends_and_tell_what_went_before() -> None:
    world = GameWorld()
    env = make_env(world)
    (obs, info), steps = played(env)
    assert len(world.seen) == 1 + sum(bool((step[2] | step[3]).any()) for step in steps)
    for frames, actions, first in world.seen:
        assert frames.shape[1:] == (CONTEXT, *GAME.frame_shape)
        assert torch.equal(actions, frames[:, :-1, 0, 0, 0].long() % GAME.actions)
        assert torch.equal(first, torch.isin(frames[..., 0, 0, 0], torch.tensor([1, 21, 41])))
    assert np.array_equal(info["context_obs"], world.seen[0][0].numpy())
    assert np.array_equal(info["context_obs"][:, -1], obs)
    assert info["_context_obs"].all()
    for obs, _, terminated, truncated, told in steps:
        over = terminated | truncated
        assert ("context_obs" in told) == over.any()
        if over.any():
            assert np.array_equal(told["_context_obs"], over)
            assert np.array_equal(told["context_obs"][over][:, -1], obs[over])
            assert told["context_action"].shape == (ENVS, CONTEXT - 1)
            assert told["context_first"].shape == (ENVS, CONTEXT)


def test_a_seed_decides_everything_and_another_decides_otherwise() -> None:
    def rewards(seed: int) -> Any:
        return np.stack([step[1] for step in played(make_env(DrawingWorld()), seed=seed)[1]])

    assert np.array_equal(rewards(3), rewards(3))
    assert not np.array_equal(rewards(3), rewards(4))
    env = make_env(DrawingWorld())
    env.reset(seed=3)
    assert not np.array_equal(env.reset()[0], make_env(DrawingWorld()).reset(seed=3)[0])


def test_bad_input_is_one_line() -> None:
    with pytest.raises(InputError, match="replay: env is 'other', expected 'game'"):
        ImaginedVectorEnv(GameWorld(), make_replay(replace(GAME, env="other")), ENVS, CONTEXT, HORIZON)
    with pytest.raises(InputError, match="horizon: must be at least 1, got 0"):
        ImaginedVectorEnv(GameWorld(), make_replay(), ENVS, CONTEXT, 0)
    env = make_env()
    with pytest.raises(InputError, match="call reset first"):
        env.step(np.zeros(ENVS, np.int64))
    env.reset(seed=0)
    for actions in ([0, 1, 2, 3, 0], [0, -1, 0, 0, 0], [0, 1]):
        with pytest.raises(InputError, match=r"^actions: must be 5 of 0 to 2, got \["):
            env.step(np.array(actions))


def real_vector(starts: Iterable[int] = range(1, 90)) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: RealGame(starts) for _ in range(ENVS)], autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("make", [real_vector, make_env])
def test_a_rollout_tells_each_step_whole_whoever_plays_whatever(make: Any) -> None:
    env = make()
    found = rollout(env, RandomPolicy(GAME.actions, np.random.default_rng(0)), 40, EnvState.reset(env, seed=1))
    steps = found.segments
    numbers, after = steps.obs[..., 0, 0, 0], steps.next_obs[..., 0, 0, 0]
    for number, action, following, reward, over in zip(
        *(x.ravel() for x in (numbers, steps.action, after, steps.reward, steps.terminated)), strict=True
    ):
        assert (following, pytest.approx(reward), over) == play(int(number), int(action))
    over = steps.terminated | steps.truncated
    assert np.array_equal(steps.first[:, 1:], over[:, :-1])
    assert steps.first[:, 0].all()
    assert np.array_equal(numbers[:, 1:][~over[:, :-1]], after[:, :-1][~over[:, :-1]])
    assert sorted(map(list, found.endings)) == np.argwhere(over).tolist()
    assert steps.reward.dtype == np.float32
    assert steps.action.dtype == np.int64


def test_two_rollouts_are_one_of_both_lengths() -> None:
    parts, whole = make_env(), make_env()
    policies = [RandomPolicy(GAME.actions, np.random.default_rng(0)) for _ in range(2)]
    env_states = [EnvState.reset(env, seed=2) for env in (parts, whole)]
    head = rollout(parts, policies[0], 7, env_states[0])
    tail = rollout(parts, policies[0], 5, head.env_state)
    both = rollout(whole, policies[1], 12, env_states[1])
    joined = [
        np.concatenate([getattr(head.segments, name), getattr(tail.segments, name)], axis=1)
        for name in Segments.__dataclass_fields__
    ]
    assert equal(Segments(*joined), both.segments)


class Remembering:
    """A policy that keeps, for each environment, what it saw in this episode."""

    def __init__(self) -> None:
        self.memory: list[list[int]] = [[] for _ in range(ENVS)]

    def __call__(self, obs: Any, first: Any, info: dict[str, Any]) -> Any:
        for row, number in enumerate(obs[:, 0, 0, 0].tolist()):
            if first[row]:
                self.memory[row] = info["context_obs"][row, :-1, 0, 0, 0].tolist()
            self.memory[row].append(number)
        return np.array([sum(memory) % GAME.actions for memory in self.memory])


def test_a_policy_with_memory_sees_the_context_of_every_start() -> None:
    policy = Remembering()
    env = make_env()
    steps = rollout(env, policy, 30, EnvState.reset(env, seed=0)).segments
    assert steps.first[:, 1:].any()
    for row, memory in enumerate(policy.memory):
        begun = int(np.flatnonzero(steps.first[row])[-1])
        assert memory[CONTEXT - 1 :] == steps.obs[row, begun:, 0, 0, 0].tolist()
        assert len(memory) == CONTEXT - 1 + steps.obs.shape[1] - begun


def test_other_autoreset_modes_are_refused() -> None:
    env = SyncVectorEnv([lambda: RealGame(range(9))])
    begun = EnvState.reset(env, seed=0)
    with pytest.raises(ValueError, match="must be SAME_STEP"):
        rollout(env, RandomPolicy(3, np.random.default_rng(0)), 1, begun)


def test_what_was_played_goes_into_a_replay_piece_by_piece() -> None:
    env = real_vector()
    policy = RandomPolicy(GAME.actions, np.random.default_rng(0))
    head = rollout(env, policy, 9, EnvState.reset(env, seed=0))
    tail = rollout(env, policy, 8, head.env_state)
    replay = Replay(GAME, 1000)
    for part in (head, tail):
        replay.add_segments(part.segments, "random", seed=5)
    whole = replay.sample(300, 17, np.random.default_rng(0))
    rows = {row.tobytes(): i for i, row in enumerate(np.concatenate([head.segments.obs, tail.segments.obs], axis=1))}
    for b in range(300):
        i = rows[whole.obs[b].tobytes()]
        for name in Segments.__dataclass_fields__:
            joined = np.concatenate([getattr(head.segments, name)[i], getattr(tail.segments, name)[i]])
            assert np.array_equal(getattr(whole, name)[b], joined)
    assert not all(episode.open for episode in replay.episodes())
    anew = rollout(env, policy, 4, EnvState.reset(env, seed=None))
    replay.add_segments(anew.segments, "random", seed=5)
    assert len(replay) == ENVS * 21
