"""ALFWorld: original games from `ALFWORLD_DATA`, and games built from the package's data.

The engine runs in a process of its own (`simulator`), which is killed if it does not answer. A variation is a game's
name: the folders below `json_2.1.1` of an original game, "built/TASK-PLAN-SEED" of a built one.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from zlib import crc32

from data_prep.environments.alfworld import expert as expert
from data_prep.environments.alfworld.facts import NAMES, contents_facts
from data_prep.environments.alfworld.games import TASKS, build_game, list_dev_games, list_games
from data_prep.environments.alfworld.hidden import describe
from data_prep.environments.base import Declared, SimulatorError
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError

FOLDERS = {"train": ("train", "valid_train"), "valid_seen": ("valid_seen",), "valid_unseen": ("valid_unseen",)}
"""Splits of original games and their folders. Any one of a split's folders is enough."""

BUILT = "built"
DEV = "dev"
"""Games to tune on: of the original train games one in five, by name, and some that are built for it."""

HELD_OUT = 5
DEFAULT_DATA = "~/.cache/alfworld"
"""Folder of `alfworld-download` if `ALFWORLD_DATA` is not set."""

TIME_LIMIT = 120
"""Seconds for one answer of the engine; grounding the largest game takes about one."""

_TASK_SENTENCE = re.compile(r"Your task is to: .*")
_START = "You are in the middle of a room."
_NOWHERE = f"{_START} Looking quickly around you, you see nothing."
"""Answer of `look` before the player has gone anywhere, although the recorded look lists the room's places."""

_PLACE = re.compile(r"(?:On the|The) (\w+ \d+)(?:,| is)")
_PLACES = re.compile(r"\b[a-z]+ \d+")
_SHOWN = re.compile(r"(?:On the|The) (\w+ \d+)(?: is open\. In it)?, you see")


class AlfWorld(Declared):
    """One engine with one game."""

    name = "alfworld"
    looks: tuple[str, ...] = ("look", "inventory")
    idles: tuple[str, ...] = ()
    families: Mapping[str, tuple[str, ...]] = {
        "clean": ("pick_clean_then_place_in_recep",),
        "cool": ("pick_cool_then_place_in_recep",),
        "heat": ("pick_heat_then_place_in_recep",),
        "look": ("look_at_obj_in_light",),
        "pick": ("pick_and_place_simple", "pick_two_obj_and_place"),
    }
    solver = "expert"
    packages = ("alfworld", "textworld", "fast_downward")
    names = NAMES
    kinds = Path(__file__).with_name("kinds.json")
    numbered = True
    facts = staticmethod(contents_facts)

    @staticmethod
    def state_queries(look: str, inventory: str) -> tuple[tuple[str, str], ...]:
        """Split the recorded look into the answers of `look` and of `examine` for each place the player faces."""
        facing, *views = look.splitlines() or [""]
        examined = [(f"examine {place[1]}", view) for view in views if (place := _PLACE.match(view))]
        return (("look", _NOWHERE if facing.startswith(_START) else facing), ("inventory", inventory), *examined)

    def __init__(self) -> None:
        if missing := [package for package in self.packages if find_spec(package) is None]:
            raise InputError(f"alfworld: the package {missing[0]} is not installed; pip install 'loopwm[alfworld]'")
        self._engine = _Engine()
        self._game = self._kind = self._task = ""
        self._goal: expert.Goal | None = None
        self._seen: set[str] = set()
        self.places: list[str] = []
        """All places of the room; only the first look names them."""

        self._first: dict[str, Any] | None = None
        """First step of the loaded game, until another step is taken."""

    def version(self) -> dict[str, str]:
        return {package: metadata.version(package) for package in ("alfworld", "textworld")}

    def tasks(self) -> list[str]:
        return list(TASKS)

    def splits(self) -> list[str]:
        return [*FOLDERS, BUILT, DEV]

    def variations(self, task: str, split: str) -> list[str]:
        """Return names of games. Raises InputError if the split's games are missing."""
        if split == BUILT:
            return list(list_games(task))
        folder = "train" if split == DEV else split
        games = [n for n in _original_games(_data_folder(), folder) if n.split("/")[1].startswith(f"{task}-")]
        if split == DEV:
            return [name for name in games if held_out(name)] + list(list_dev_games(task))
        return [name for name in games if split != "train" or not held_out(name)]

    def gold_actions(self, task: str, variation: int | str) -> list[str]:
        self._load(task, str(variation))
        return self.plan(None, ())

    def loaded(self) -> tuple[str, str]:
        return self._kind, self._game

    def mark(self) -> None:
        """Return None: a new plan does not depend on the place where the old one was left."""

    def plan(self, mark: None, rest: Sequence[str]) -> list[str]:
        """Return a plan that wins from here, for a player who knows the observations so far.

        Raises SimulatorError if there is none.
        """
        assert self._goal is not None
        return expert.make_plan(self._engine.call("facts"), self._goal, self._seen, self._game)

    def reset(self, task: str, variation: int | str) -> Step:
        self._load(task, str(variation))
        assert self._first is not None
        return _step(None, self._first)

    def goal(self) -> str:
        return self._task

    def hidden_state(self) -> str | None:
        return describe(expert.Situation.of(self._engine.call("facts")))

    def step(self, action: str) -> Step:
        self._first = None
        reply = self._engine.call("step", action)
        self._seen.update(_SHOWN.findall(reply["observation"]))
        return _step(action, reply)

    def valid_actions(self) -> list[str]:
        """Return all commands but `help`, whose answer is the same in every game."""
        return [command for command in self._engine.call("commands") if command != "help"]

    def close(self) -> None:
        self._engine.close()

    def _load(self, task: str, name: str) -> None:
        """Restart a game, unless it has just been started."""
        self._kind = task
        if self._first is not None and name == self._game:
            return
        self._first = None
        game = build_game(name) if name.startswith(f"{BUILT}/") else _read_game(name)
        self._goal = expert.parse_goal(game["pddl_problem"])
        self._first = self._engine.call("load", game)
        match = _TASK_SENTENCE.search(self._first["observation"])
        self._task = match[0] if match else ""
        self._game, self._seen, self.places = name, set(), _PLACES.findall(self._first["look"])


def _step(action: str | None, reply: dict[str, Any]) -> Step:
    score = 100 if reply["won"] else 0
    return Step(action, reply["observation"], score, reply["won"], reply["look"], reply["inventory"])


def _data_folder() -> Path:
    return Path(os.environ.get("ALFWORLD_DATA") or DEFAULT_DATA).expanduser() / "json_2.1.1"


@cache
def _original_games(root: Path, split: str) -> tuple[str, ...]:
    """Return names of a split's games. Counts those that cannot be played on standard error, with an example of each.

    Raises InputError if there are none.
    """
    games, faults = [], Counter[str]()
    examples: dict[str, str] = {}
    for path in sorted(path for folder in FOLDERS[split] for path in root.glob(f"{folder}/*/*/game.tw-pddl")):
        name = path.parent.relative_to(root).as_posix()
        if fault := _fault(name, path.read_bytes()):
            faults[fault] += 1
            examples.setdefault(fault, name)
        else:
            games.append(name)
    for fault, count in faults.items():
        print(f"alfworld: {split}: skipped {count} games {fault}, such as {examples[fault]}", file=sys.stderr)
    if not games:
        folders = " or ".join(FOLDERS[split])
        raise InputError(f"ALFWORLD_DATA: no games under {root}/{folders}; run alfworld-download, or use --split built")
    return tuple(games)


def held_out(name: str) -> bool:
    """Return True for a dev game; the same for its copies in other folders of the download."""
    return crc32(f"valid_train/{name.partition('/')[2]}".encode()) % HELD_OUT == 0  # unlike `hash`, stable


def _fault(name: str, content: bytes) -> str | None:
    """Return why a game is not played, or None. Searches the text: parsing thousands of games would take minutes."""
    if "Sliced" in name:
        return "about sliced things"
    if b'"solvable": true' not in content:
        return "not marked solvable"
    return None if b"move {o} to {r}" in content else "of another grammar version"


def _read_game(name: str) -> dict[str, Any]:
    """Read a game. Raises SimulatorError for an invalid file, so that the others are still played."""
    try:
        game = json.loads((_data_folder() / name / "game.tw-pddl").read_bytes())
        return {field: game[field] for field in ("pddl_domain", "grammar", "pddl_problem")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SimulatorError(f"game.tw-pddl: {type(error).__name__}: {error}") from error


class _Engine:
    """Engine process, started at the first call; a failed call may be followed by others."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the engine. Raises SimulatorError if it refuses, dies or does not answer in time."""
        process = self._process = self._process or _start_engine()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"call": name, "arguments": arguments}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise self._lost("died") from error
        reply = json.loads(self._read_line(process))
        if "error" in reply:
            raise SimulatorError(reply["error"])
        return reply["result"]

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + TIME_LIMIT
        while b"\n" not in self._unread:
            ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise self._lost(f"gave no answer in {TIME_LIMIT} s")
            received = os.read(process.stdout.fileno(), 1 << 16)
            if not received:
                raise self._lost("died")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lost(self, what: str) -> SimulatorError:
        self.close()
        return SimulatorError(f"the engine {what}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._unread = None, b""


def _start_engine() -> subprocess.Popen[bytes]:
    """Start the engine, which ends with this process when its input closes."""
    root = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "data_prep.environments.alfworld.simulator"],
        # the package creates the folder in ALFWORLD_DATA, which the engine does not need
        # The hash seed fixes the order of the engine's sets.
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0", "ALFWORLD_DATA": gettempdir()},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
