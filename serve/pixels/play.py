"""`loopwm play --pixels`: play a game and a world model of it side by side in the terminal.

The simulator is on the left, the imagined world on the right. Cells in which they differ are outlined.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import select
import shutil
import string
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.gym import CATCH
from loopwm.pixel.replay import Replay
from loopwm.records.command import Parser, exit_status
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameEpisode, FrameSpace
from loopwm.training.real_world import real_environment
from serve.pixels.game import Game
from serve.pixels.pictures import half_blocks, picture, write_gif

EXAMPLE = """examples:
  loopwm play --pixels
  loopwm play --pixels --keys 0012..... --gif catch.gif"""
KEYS = """keys:
  0 1 2 ... 9 a b ...  take that action; arrows too, where the game has directions
  B  back: take back the last step     F  fork: the imagined world starts again from the real frames
  N  next episode                      .  one random action
  A  random actions until the next key    Q  quit"""
ACTIONS = string.digits + string.ascii_lowercase
COMMANDS: Mapping[str, Callable[[Game], None]] = {
    "B": Game.back, "F": Game.fork, "N": Game.restart, ".": Game.act_randomly,
}  # fmt: skip
ARROWS = {
    "catch": "LDR", "minatar/breakout": "-LR", "minatar/freeway": "-UD", "minatar/space_invaders": "-LR",
    "minatar": "-LURD", "minigrid": "LRU", "craft": "-LRUD",
}  # fmt: skip
"""Directions of a game's first actions; the longest name that fits counts."""
LINES_BELOW = 8
"""Lines of the terminal under the picture."""


class Keyboard:
    """Keys of a game: an action, a command or nothing."""

    def __init__(self, space: FrameSpace) -> None:
        self._actions = min(space.actions, len(ACTIONS))
        names = [name for name in ARROWS if space.env.startswith(name)]
        self._arrows = ARROWS[max(names, key=len)] if names else ""

    def command(self, key: str) -> Callable[[Game], None] | None:
        """Return what a key does, None if it does nothing. Arrows are the keys UP, DOWN, LEFT and RIGHT."""
        action = self._arrows.find(key[0]) if len(key) > 1 else ACTIONS.find(key)
        if 0 <= action < self._actions:
            return lambda game: game.act(action)
        return COMMANDS.get(key.upper())

    def script(self, keys: str) -> list[str]:
        """Return the keys of a script without white space. Raises InputError for an unknown one."""
        script = [key for key in keys if not key.isspace()]
        for key in script:
            if self.command(key) is None:
                known = f"0 to {ACTIONS[self._actions - 1]}, {', '.join(COMMANDS)}"
                raise InputError(f"--keys: must be of {known}, got {key!r}")
        return script

    def typed(self, per_second: float) -> Iterator[str]:
        """Yield keys of the terminal until Q, random actions in between after A."""
        automatic = False
        while True:
            if automatic and not select.select([sys.stdin], [], [], 1 / per_second)[0]:
                yield "."
                continue
            for key in _pressed():
                letter = "" if self.command(key) else key.upper()  # a and q may be actions
                if letter in ("Q", "\x04", "\x1b"):
                    return
                automatic = letter == "A" and not automatic
                yield key


def _pressed() -> list[str]:
    """Return the keys that were pressed; wait for one. At the end of input it is Ctrl-D."""
    names = {"\x1b[A": "UP", "\x1b[B": "DOWN", "\x1b[C": "RIGHT", "\x1b[D": "LEFT"}
    text = os.read(sys.stdin.fileno(), 1024).decode(errors="ignore") or "\x04"
    return [names.get(key, key) for key in re.findall(r"\x1b\[[A-D]|.", text, re.DOTALL)]


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Prepare the terminal: keys without Enter, no cursor, an empty screen. Raises InputError on Windows."""
    try:
        import termios
        import tty
    except ModuleNotFoundError as error:
        raise InputError("--keys: needed on Windows") from error
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    print("\x1b[?25l\x1b[2J", end="")
    try:
        yield
    finally:
        print("\x1b[?25h")
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Session:
    """Game whose moments are shown and recorded."""

    def __init__(self, game: Game, keyboard: Keyboard, per_second: float) -> None:
        self.game, self._keyboard, self._per_second = game, keyboard, per_second
        self.moments, self.captions = [game.now], [game.status]
        self._seconds = 0.0

    def play(self, keys: Iterable[str], paced: bool) -> None:
        """Press keys, and show the game after each that does something. paced: wait between them."""
        self._show()
        for key in keys:
            if (command := self._keyboard.command(key)) is None:
                continue
            started = time.perf_counter()
            command(self.game)
            self.moments.append(self.game.now)
            self.captions.append(self.game.status)
            self._show()
            self._seconds += (spent := time.perf_counter() - started)
            if paced:
                time.sleep(max(0.0, 1 / self._per_second - spent))

    def _show(self) -> None:
        if not sys.stdout.isatty():
            print(self.captions[-1].replace("\n", ", "))
            return
        columns, lines = shutil.get_terminal_size()
        moment, below = self.moments[-1], self.captions[-1].split("\n") + KEYS.split("\n")
        free = lines - len(below) - 1
        scale = max(1, min(2 * free, 40) // (len(moment.imagined.frame) + 2))
        text = [*half_blocks(picture(moment, scale), columns, free), *below]
        print("\x1b[H" + "\x1b[K\n".join(text) + "\x1b[J", end="", flush=True)

    def summary(self) -> str:
        frames = len(self.moments) - 1
        rate = f"{frames / self._seconds:.0f} frames/s" if frames else "no frames"
        return f"{self.game.status.splitlines()[-1]}, {self.game.episodes} episodes; {rate} of play and drawing"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="loopwm play --pixels",
        description=__doc__,
        epilog=f"{KEYS}\n\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pixels", action="store_true", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, default=CATCH, help="checkpoint folder (default: the packaged Catch)")
    parser.add_argument("--starts", type=Path, help="recorded episodes to start in where there is no simulator")
    parser.add_argument("--keys", help="play these keys instead of the terminal's")
    parser.add_argument("--gif", type=Path, metavar="FILE", help="record the game (needs Pillow)")
    parser.add_argument("--fps", type=float, default=15.0, help="frames/s of A, --keys and the GIF (default: 15)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    return exit_status(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    if not args.fps > 0:
        raise InputError(f"--fps: must be above 0, got {args.fps:g}")
    if args.gif is not None:
        _check_gif(args.gif)
    system = load_checkpoint(args.model)
    keyboard = Keyboard(system.space)
    typed = args.keys is None and sys.stdin.isatty()
    script = [] if typed else keyboard.script(sys.stdin.read() if args.keys is None else args.keys)
    env, missing = _simulator(system.space)
    starts = [] if env else _starts(args.starts or args.model / "starts", system.space, missing)
    session = Session(Game(system.world(), env, starts, args.seed), keyboard, args.fps)
    if missing:
        print(f"the imagined world alone: {missing}", file=sys.stderr)
    with _screen() if typed else contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
        session.play(keyboard.typed(args.fps) if typed else script, paced=not typed and sys.stdout.isatty())
    print(session.summary())
    if args.gif is not None:
        write_gif(args.gif, session.moments, session.captions, args.fps)


def _check_gif(path: Path) -> None:
    """Raise InputError now rather than after the game if the GIF cannot be written."""
    if importlib.util.find_spec("PIL") is None:
        raise InputError("--gif: the package pillow is not installed: pip install pillow")
    if not path.parent.is_dir():
        raise InputError(f"--gif: {path.parent}: no such folder")


def _simulator(space: FrameSpace) -> tuple[Any, str]:
    """Return the simulator of these frames and an empty string, or None and the reason why there is none."""
    try:
        env = real_environment(space.env)
        space.require(env.get_wrapper_attr("space"), f"simulator of {space.env}")
    except InputError as error:
        return None, str(error)
    return env, ""


def _starts(folder: Path, space: FrameSpace, missing: str) -> list[FrameEpisode]:
    """Read the episodes that imagined worlds start in. Raises InputError, which includes why they are needed."""
    try:
        replay = Replay.from_folder(folder)
        space.require(replay.space, str(folder))
    except InputError as error:
        raise InputError(f"{missing}; without it --starts is needed: {error}") from error
    return replay.episodes()
