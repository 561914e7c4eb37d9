"""`python -m serve play`: the playground in the terminal, over a running service or one of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwm.records.command import Parser
from loopwm.records.errors import InputError
from loopwm.records.files import PACKAGED
from loopwm.worlds.http import Client, WorldError
from serve.playground import EXAMPLES

Json = dict[str, Any]

EXAMPLE = """examples:
  python -m serve play --model loopwm/pretrained
  python -m serve play --url http://127.0.0.1:8000 --example find/0006"""
HELP = """ACTION            imagine it; several, separated by ;, are imagined one after another
act ACTION        the same, for an action that begins with a word of this list
observe ACTION    what really happened after it; imagined steps since the last real observation are dropped
plan A; B | C     scores of action sequences; the world stays
truth             what the simulator said after the last action, as long as an example's actions are taken
fork              a copy of this world, to try something else in
worlds            all worlds; the one in use is marked
world N           use another one
help, quit"""
END_OF_TEXT = "."


class PlayError(Exception):
    """A command that cannot be done, in one line."""


@dataclass
class Branch:
    """A world, what it was made from, and the actions it has taken. real: how many of them really happened."""

    id: str
    actions: list[str]
    real: int = 0


class Game:
    """A few worlds with the same beginning. Commands come as lines; what they say goes to `write`, bit by bit."""

    def __init__(self, client: Client, start: Json, write: Callable[[str], None], ask: Callable[[], str]) -> None:
        """ask: the next line of a text. Raises WorldError."""
        self._client = client
        self._write = write
        self._ask = ask
        self._recorded = list(zip(start.get("actions", ()), start.get("observations", ()), strict=False))
        fields = ("goal", "observation", "history", "look", "inventory", "hidden_state", "depth")
        body = {field: start[field] for field in fields if field in start}
        self._branches = [Branch(client.call("POST", "worlds", {"model": client.model(), **body})["id"], [])]
        self._now = 0

    @property
    def prompt(self) -> str:
        return f"world {self._now + 1}> "

    def command(self, line: str) -> None:
        """Raises PlayError or WorldError; the worlds are as before then."""
        word, _, rest = line.strip().partition(" ")
        bare: dict[str, Callable[[], None]] = {
            "fork": self._fork, "worlds": self._worlds, "truth": self._truth, "help": self._help,
        }  # fmt: skip
        given: dict[str, Callable[[str], None]] = {
            "act": self._act, "observe": self._observe, "plan": self._plan, "world": self._use,
        }  # fmt: skip
        if word in bare and not rest:
            bare[word]()
        elif word in given:
            given[word](rest.strip())
        elif word:
            self._act(line)

    @property
    def _branch(self) -> Branch:
        return self._branches[self._now]

    def _say(self, line: str) -> None:
        self._write(line + "\n")

    def _post(self, what: str, body: Json) -> Json:
        return self._client.call("POST", f"worlds/{self._branch.id}/{what}", body)

    def _act(self, text: str) -> None:
        """Shows the first observation as it comes, those after it when all are there."""
        actions = _actions(text)
        reply: Json = {}
        shown = 0
        try:
            for reply in self._client.events(f"worlds/{self._branch.id}/step", {"actions": actions, "decode": "each"}):
                if reply.get("index") == 0:
                    piece = reply["delta"].get("observation", "")
                    self._write(piece)
                    shown += len(piece)
        except WorldError:
            self._write("\n" if shown else "")
            raise
        self._branch.actions += actions
        for step in reply["steps"]:
            self._say(step["observation"][shown:])
            self._say(f"  [{_facts(step)}, {reply['usage']['loops']['decode']:.1f} a token]")
            shown = 0

    def _observe(self, action: str) -> None:
        if not action:
            raise PlayError("observe: name the action after which it was seen")
        self._say(f"what was seen, ended by a line with {END_OF_TEXT!r} alone:")
        lines = list(iter(self._ask, END_OF_TEXT))
        self._post("observe", {"action": action, "observation": "\n".join(lines)})
        branch = self._branch
        branch.actions[branch.real :] = [action]
        branch.real += 1
        self._say("noted; imagined steps since the last real observation are dropped")

    def _plan(self, text: str) -> None:
        candidates = [_actions(candidate) for candidate in text.split("|")]
        reply = self._post("plan", {"candidates": candidates})
        for i, (actions, found) in enumerate(zip(candidates, reply["candidates"], strict=True)):
            mark = "*" if i == reply["best"] else " "
            self._say(f"{mark} {found['score']:8.2f}  {'; '.join(actions)}")
        self._say(reply["observation"])

    def _truth(self) -> None:
        taken = self._branch.actions
        if not taken or [action for action, _ in self._recorded[: len(taken)]] != taken:
            raise PlayError("truth: nothing is recorded for these actions")
        self._say(self._recorded[len(taken) - 1][1])

    def _fork(self) -> None:
        (made,) = self._post("fork", {"count": 1})["data"]
        self._branches.append(Branch(made["id"], list(self._branch.actions), self._branch.real))
        self._now = len(self._branches) - 1
        self._say(f"now in world {self._now + 1}")

    def _worlds(self) -> None:
        for i, branch in enumerate(self._branches):
            self._say(f"{'*' if i == self._now else ' '} {i + 1}  {'; '.join(branch.actions) or '(nothing done yet)'}")

    def _use(self, number: str) -> None:
        if not number.isdecimal() or not 1 <= int(number) <= len(self._branches):
            raise PlayError(f"world: {number!r} is not a number from 1 to {len(self._branches)}")
        self._now = int(number) - 1

    def _help(self) -> None:
        self._say(HELP)
        if self._recorded:
            self._say(f"the example's actions: {'; '.join(action for action, _ in self._recorded)}")


def _actions(text: str) -> list[str]:
    actions = [action.strip() for action in text.split(";") if action.strip()]
    if not actions:
        raise PlayError("an action is missing; see help")
    return actions


def _facts(step: Json) -> str:
    told = f"{step['loops']} loops to advance"
    if step["reward"] is not None:
        told = f"reward {step['reward']:.1f}, goes on {step['continuation']:.0%}, {told}"
    return told


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m serve play",
        description=__doc__,
        epilog=EXAMPLE + "\n\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a running service, such as http://127.0.0.1:8000")
    where.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint folder")
    parser.add_argument("--api-key-file", type=Path, help="file with the service's API key")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--example", metavar="NAME", help=f"one of {', '.join(_examples())}; by default the first")
    start.add_argument("--world", type=Path, metavar="FILE", help="JSON with goal, observation and, if wanted, history")
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    try:
        start, key = _start(args), _key(args.api_key_file)
        with _service(args) as base:
            game = Game(Client(base, key), start, _write, input)
            _show(start)
            play(game)
    except (PlayError, WorldError, InputError, EOFError) as error:
        print(f"error: {str(error) or 'the text has no end'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def play(game: Game) -> None:
    """Commands from standard input until its end or `quit`. An error is said, and the game goes on."""
    watched = sys.stdin.isatty()
    if watched:
        print("help lists the commands")
    while True:
        try:
            line = input(game.prompt if watched else "")
        except EOFError:
            return
        if line.strip() == "quit":
            return
        try:
            game.command(line)
        except (PlayError, WorldError) as error:
            print(f"error: {error}")


def _write(text: str) -> None:
    print(text, end="", flush=True)


@contextlib.contextmanager
def _service(args: argparse.Namespace) -> Iterator[str]:
    """The address of the service: the one named, or one of its own for a checkpoint. Raises PlayError."""
    if args.url is not None:
        yield args.url
        return
    command = [sys.executable, "-m", "serve", "--model", str(args.model), "--port", "0"]
    # In a session of its own, Ctrl-C reaches the game alone.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline().split()
            if not said:
                raise PlayError("the service did not start")
            yield said[-1]
        finally:
            server.terminate()


def _start(args: argparse.Namespace) -> Json:
    if args.world is not None:
        return _object(args.world)
    examples = _examples()
    name = args.example or next(iter(examples))
    if name not in examples:
        raise PlayError(f"--example: there is no {name!r}, expected one of {', '.join(examples)}")
    return examples[name]


def _show(start: Json) -> None:
    """What was seen so far. The service has found its fields to be right."""
    print(start["goal"], start["observation"], sep="\n\n")
    for step in start.get("history") or ():
        print(f"> {step['action']}", step["observation"], sep="\n")


def _object(path: Path) -> Json:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlayError(f"--world: {error}") from error
    if not isinstance(found, dict):
        raise PlayError(f"--world: {path} does not hold an object")
    return found


def _key(path: Path | None) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() if path else None
    except (OSError, ValueError) as error:
        raise PlayError(f"--api-key-file: {error}") from error


def _examples() -> dict[str, Json]:
    return {example["name"]: example for example in json.loads(EXAMPLES.read_text(encoding="utf-8"))}
