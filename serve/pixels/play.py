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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.gym import CATCH, real_environment, world_folder
from loopwm.pixel.replay import Replay
from loopwm.records.command import above_zero, at_least_zero, doc_parser, exit_status
from loopwm.records.errors import InputError, naming
from loopwm.records.frames import FrameEpisode, FrameSpace
from serve.pixels.game import Game, Moment
from serve.pixels.pictures import half_blocks, picture, write_gif

EXAMPLE = """examples:
  loopwm play --pixels
  loopwm play --pixels --keys 0012..... --gif catch.gif"""
KEYS = """keys:
  0 1 2 ... 9 a b ...  take that action; arrows too, where the game has directions
  B  back: take back the last step     F  fork: the imagined world starts again from the real frames
  N  next episode                      .  one random action
  A  the agent, which plans in the imagined world, plays until the next key    Q  quit"""
ACTIONS = string.digits + string.ascii_lowercase
Command = Callable[[Game], None]
COMMANDS: Mapping[str, Command] = {
    "A": Game.act_by_plan, "B": Game.back, "F": Game.fork, "N": Game.restart, ".": Game.act_randomly,
}  # fmt: skip
ARROWS = {
    "catch": "LDR", "minatar/breakout": "-LR", "minatar/freeway": "-UD", "minatar/space_invaders": "-LR",
    "minatar": "-LURD", "minigrid": "LRU", "craft": "-LRUD",
}  # fmt: skip
"""Directions of a game's first actions; the longest name that fits counts."""


class Keyboard:
    """Keys of a game: an action, a command or nothing."""

    def __init__(self, space: FrameSpace) -> None:
        self.actions = ACTIONS[: space.actions]
        names = [name for name in ARROWS if space.env.startswith(name)]
        self.arrows = ARROWS[max(names, key=len)] if names else ""

    def command(self, key: str) -> Command | None:
        """Return what a key does, None if it does nothing. Arrows are the keys UP, DOWN, LEFT and RIGHT."""
        action = self.arrows.find(key[0]) if len(key) > 1 else self.actions.find(key)
        if 0 <= action < len(self.actions):
            return lambda game: game.act(action)
        return COMMANDS.get(key.upper())

    def script(self, keys: str) -> Iterator[Command]:
        """Yield the commands of a script, in which white space is ignored. Raises InputError for an unknown key."""
        for key in "".join(keys.split()):
            if (command := self.command(key)) is None:
                known = f"0 to {self.actions[-1]}, {', '.join(COMMANDS)}"
                raise InputError(f"--keys: must be of {known}, got {key!r}")
            yield command

    def typed(self, per_second: float) -> Iterator[Command]:
        """Yield the commands of keys in the terminal until Q; after A, the agent's until the next key."""
        automatic = False
        while True:
            if automatic and not select.select([sys.stdin], [], [], 1 / per_second)[0]:
                yield Game.act_by_plan
                continue
            for key in _pressed():
                if command := self.command(key):  # a and q may be actions
                    automatic = command is Game.act_by_plan and not automatic
                    yield command
                elif key.upper() in ("Q", "\x04", "\x1b"):
                    return
                else:
                    automatic = False


def _pressed() -> list[str]:
    """Return the keys that were pressed; wait for one. At the end of input it is Ctrl-D."""
    names = {"\x1b[A": "UP", "\x1b[B": "DOWN", "\x1b[C": "RIGHT", "\x1b[D": "LEFT"}
    text = os.read(sys.stdin.fileno(), 1024).decode(errors="ignore") or "\x04"
    return [names.get(key, key) for key in re.findall(r"\x1b[\[O]+[\d;]*[A-Za-z~]|.", text, re.DOTALL)]


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


def play(game: Game, commands: Iterable[Command], pause: float) -> Iterator[tuple[Moment, str]]:
    """Run commands; show and yield the game and its status at the beginning and after each.

    pause: least seconds between frames
    """
    yield _show(game)
    for command in commands:
        started = time.perf_counter()
        command(game)
        yield _show(game)
        time.sleep(max(0.0, started + pause - time.perf_counter()))


def _show(game: Game) -> tuple[Moment, str]:
    """Draw the game in a terminal, else print a line. Return what a recording needs."""
    moment, status = replace(game.now, state=None), game.status
    if not sys.stdout.isatty():
        print(status.replace("\n", ", "))
        return moment, status
    columns, lines = shutil.get_terminal_size()
    below = [*status.split("\n"), *KEYS.split("\n")]
    free = lines - len(below) - 1
    scale = max(1, min(2 * free, 40) // (len(moment.imagined.frame) + 2))
    text = [*half_blocks(picture(moment, scale), columns, free), *below]
    print("\x1b[H" + "\x1b[K\n".join(text) + "\x1b[J", end="", flush=True)
    return moment, status


def build_parser() -> argparse.ArgumentParser:
    parser = doc_parser("loopwm play --pixels", __doc__, f"{KEYS}\n\n{EXAMPLE}")
    parser.add_argument("--pixels", action="store_true", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=world_folder, default=CATCH, help="folder, catch (default), breakout or memory")
    parser.add_argument("--starts", type=Path, help="recorded episodes to start in where there is no simulator")
    parser.add_argument("--keys", help="play these keys instead of the terminal's")
    parser.add_argument("--gif", type=Path, metavar="FILE", help="record the game (needs Pillow)")
    parser.add_argument("--fps", type=above_zero, default=15.0, help="frames/s of A, --keys and the GIF (default: 15)")
    parser.add_argument("--seed", type=at_least_zero, default=0, help="default: %(default)s")
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    return exit_status(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    if args.gif is not None:
        if importlib.util.find_spec("PIL") is None:
            raise InputError("--gif: the package pillow is not installed: pip install pillow")
        if not args.gif.parent.is_dir():  # now rather than after the game
            raise InputError(f"--gif: {args.gif.parent}: no such folder")
    game, keyboard, missing = open_game(args.model, args.seed, args.starts)
    typed = args.keys is None and sys.stdin.isatty()
    script = [] if typed else [*keyboard.script(sys.stdin.read() if args.keys is None else args.keys)]
    frames = deque[tuple[Moment, str]]([], None if args.gif else 1)
    if missing:
        print(f"the imagined world alone: {missing}", file=sys.stderr)
    pause = 0.0 if typed or not sys.stdout.isatty() else 1 / args.fps
    with _screen() if typed else contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
        frames.extend(play(game, keyboard.typed(args.fps) if typed else script, pause))
    print(f"{game.episodes} episodes, {game.status.splitlines()[-1]}")
    if args.gif is not None:
        write_gif(args.gif, frames, args.fps)


def open_game(folder: Path, seed: int, starts: Path | None = None) -> tuple[Game, Keyboard, str]:
    """Begin a game in a world; return it with its keyboard, and why there is no simulator (empty if there is one).

    starts: episodes to start in without a simulator, None for the checkpoint's own. Raises InputError.
    """
    system, env, episodes, missing = load_checkpoint(folder), None, list[FrameEpisode](), ""
    try:
        env = real_environment(system.space.env)
        system.space.require(env.get_wrapper_attr("space"), f"simulator of {system.space.env}")
    except InputError as error:
        env, missing = None, str(error)
        episodes = _starts(starts or folder / "starts", system.space, missing)
    return Game(system.world(), env, episodes, seed), Keyboard(system.space), missing


def _starts(folder: Path, space: FrameSpace, missing: str) -> list[FrameEpisode]:
    """Read the episodes that imagined worlds start in. Raises InputError, which includes why they are needed."""
    with naming(f"{missing}; without it --starts is needed: "):
        replay = Replay.from_folder(folder)
        space.require(replay.space, str(folder))
    return replay.episodes()
