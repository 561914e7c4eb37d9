"""Atari in the setting of the 100k benchmark: 64 x 64 colour frames, each of four of the game's, the last two merged.

Up to 30 no-ops begin an episode, actions are the game's minimal set and are never repeated at random. An episode ends
with the game, not with a life; `info` holds the lives left and lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_prep.environments.pixels.base import Frame, Outcome, Simulator, installed, resize
from loopwm.records.errors import InputError
from loopwm.records.frames import LOST, FrameSpace

PIXELS = 64
SKIP = 4
NO_OPS = 30
LIMIT = 108_000
"""Game frames after which an episode is truncated: half an hour of play."""


class Atari(Simulator):
    """One game. Infos: `lives` left, and `lost`, True if one was lost since the previous frame."""

    def __init__(self, game: str) -> None:
        """Start a game, such as Breakout or MsPacman. Raises InputError for an unknown one."""
        from ale_py import ALEInterface, LoggerMode, roms

        rom_ids = {"".join(word.title() for word in name.split("_")): name for name in roms.get_all_rom_ids()}
        if game not in rom_ids:
            raise InputError(f"atari: game: must be one of {', '.join(sorted(rom_ids))}, got {game!r}")
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._ale, rom = ALEInterface(), roms.get_rom_path(rom_ids[game])
        assert rom is not None  # the game is one of the package
        self._rom = rom
        self._ale.setFloat("repeat_action_probability", 0.0)
        self._ale.setInt("max_num_frames_per_episode", LIMIT)
        self._ale.loadROM(self._rom)
        self._actions = self._ale.getMinimalActionSet()
        version = installed("ale-py", f"skip={SKIP}", f"noops={NO_OPS}", "sticky=0")
        self.space = FrameSpace(f"atari/{game}", version, (PIXELS, PIXELS, 3), len(self._actions))

    def begin(self, seed: int) -> tuple[Frame, dict[str, Any]]:
        self._ale.setInt("random_seed", seed)
        self._ale.loadROM(self._rom)  # a seed takes effect at the next load
        self._ale.reset_game()
        for _ in range(int(np.random.default_rng(seed).integers(NO_OPS + 1))):
            self._ale.act(0)
            if self._ale.game_over():
                self._ale.reset_game()
        return resize(self._ale.getScreenRGB(), PIXELS, PIXELS), self._info(self._ale.lives())

    def act(self, action: int) -> Outcome:
        reward, last, lives = 0.0, [self._ale.getScreenRGB()], self._ale.lives()
        for _ in range(SKIP):
            reward += self._ale.act(self._actions[action])
            last = [*last[-1:], self._ale.getScreenRGB()]  # two frames: sprites may flicker
            if self._ale.game_over():
                break
        frame = resize(np.maximum(*last), PIXELS, PIXELS)
        truncated = self._ale.game_truncated()
        return Outcome(frame, reward, self._ale.game_over(with_truncation=False), truncated, self._info(lives))

    def _info(self, lives_before: int) -> dict[str, Any]:
        return {"lives": self._ale.lives(), LOST: self._ale.lives() < lives_before}
