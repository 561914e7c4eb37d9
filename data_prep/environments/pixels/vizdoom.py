"""ViZDoom's five scenarios with the rewards, limits and metrics of EDELINE's authors (EDELINE, appendix D.10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import numpy as np

from data_prep.environments.pixels.base import Frame, Outcome, installed, resize
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace

PIXELS = 64
SKIP = 4
"""Tics of an action."""
MEDKIT = 100
"""Value of a medkit in health_gathering's second variable, 16 bits after the point."""


@dataclass(frozen=True)
class Counters:
    """Totals of an episode so far.

    hits: taken. goals: 1 if the scenario ended by itself with the player alive, in deadly_corridor at the armour.
    health: in percent.
    """

    kills: float = 0
    hits: float = 0
    medkits: float = 0
    goals: float = 0
    deaths: float = 0
    health: float = 100


@dataclass(frozen=True)
class Scenario:
    """Scenario of EDELINE, appendix D.10.

    gym_id: Gymnasium's. limit: steps of an episode. rewards: for each increase of a counter. metric: the counter
    that judges an episode at its end.
    """

    gym_id: str
    limit: int
    rewards: Mapping[str, float]
    metric: str

    def reward(self, before: Counters, after: Counters) -> float:
        old, new = asdict(before), asdict(after)
        return float(sum(weight * (new[name] - old[name]) for name, weight in self.rewards.items()))


SCENARIOS = {
    "basic": Scenario("VizdoomBasic-v1", 75, {"kills": 1}, "kills"),
    "deadly_corridor": Scenario("VizdoomDeadlyCorridor-v1", 512, {"kills": 1, "goals": 1, "hits": -1}, "goals"),
    "defend_the_center": Scenario("VizdoomDefendCenter-v1", 512, {"kills": 1, "deaths": -1}, "kills"),
    "health_gathering": Scenario("VizdoomHealthGathering-v1", 512, {"medkits": 1}, "health"),
    "predict_position": Scenario("VizdoomPredictPosition-v1", 75, {"kills": 1}, "kills"),
}


class VizDoom:
    """Scenario at 64 x 64 pixels, four tics an action, one button at a time or none.

    The simulator shows no frame at the end of an episode, so the previous one is repeated.

    Infos: `metric`, the scenario's own, so far.
    """

    def __init__(self, name: str) -> None:
        """Start a scenario. Raises InputError for an unknown one."""
        import vizdoom.gymnasium_wrapper  # noqa: F401 - registers the environments
        from vizdoom import GameVariable, doom_fixed_to_double

        if name not in SCENARIOS:
            raise InputError(f"vizdoom: scenario: must be one of {', '.join(SCENARIOS)}, got {name!r}")
        self._variables, self._from_fixed = GameVariable, doom_fixed_to_double
        self._scenario = SCENARIOS[name]
        env: Any = gymnasium.make(self._scenario.gym_id, frame_skip=SKIP, max_buttons_pressed=1)
        self._env = env
        self._frame = np.zeros((PIXELS, PIXELS, 3), np.uint8)
        self._counters, self._steps = Counters(), 0
        version = installed("vizdoom", f"skip={SKIP}", "rewards=edeline")
        self.space = FrameSpace(f"vizdoom/{name}", version, self._frame.shape, int(self._env.action_space.n))

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        self._frame = self._drawn(self._env.reset(seed=seed)[0])
        self._steps, self._counters = 0, self._counted(ended=False)
        return self._frame, self._info()

    def act(self, action: int) -> Outcome:
        observation, _, over, cut, _ = self._env.step(action)
        self._steps += 1
        if not (over or cut):
            self._frame = self._drawn(observation)
        truncated = cut or (self._steps >= self._scenario.limit and not over)
        before, self._counters = self._counters, self._counted(ended=over and not cut)
        reward = self._scenario.reward(before, self._counters)
        return Outcome(self._frame, reward, over and not cut, truncated, self._info())

    def _drawn(self, observation: dict[str, Any]) -> Frame:
        return resize(observation["screen"], PIXELS, PIXELS)

    def _counted(self, ended: bool) -> Counters:
        game, of = self._env.unwrapped.game, self._variables
        dead = game.is_player_dead()
        return Counters(
            kills=game.get_game_variable(of.KILLCOUNT),
            hits=game.get_game_variable(of.HITS_TAKEN),
            medkits=self._from_fixed(int(game.get_game_variable(of.USER1))) / MEDKIT,
            goals=float(ended and not dead),
            deaths=float(dead),
            health=max(0.0, game.get_game_variable(of.HEALTH)),
        )

    def _info(self) -> dict[str, Any]:
        return {"metric": np.float64(asdict(self._counters)[self._scenario.metric])}

    def close(self) -> None:
        self._env.close()
