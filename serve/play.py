"""`python -m serve play`: the playground in the terminal, on a running service or one of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwm.records.command import doc_parser
from loopwm.records.errors import InputError, naming
from loopwm.records.files import read_json
from loopwm.worlds.protocol import WorldError
from serve.local_service import add_arguments, connected

if TYPE_CHECKING:
    from loopwm.worlds.http import Client

Json = dict[str, Any]
EXAMPLES = Path(__file__).parent / "playground" / "examples.json"

EXAMPLE = """examples:
  python -m serve play --model loopwm/pretrained
  python -m serve play --url http://127.0.0.1:8000 --example find/0006
  python -m serve play --pixels --help      a game of frames beside its imagined world"""
HELP = """ACTION            imagine an action, or several separated by ;
act ACTION        the same, for an action that begins with a word of this list
observe ACTION    enter the real observation after an action; drops imagined steps since the last one
plan A; B | C     score action sequences; the world does not change
truth             show the recorded observation after the last action, while following an example
fork              copy this world and switch to the copy
worlds            list all worlds; * marks the current one
world N           switch to world N
help, quit"""
END_OF_TEXT = "."
FIELDS = {"goal", "observation", "history", "look", "inventory", "hidden_state", "depth"}


@dataclass
class Branch:
    """World session with its actions, of which the first `real` ones are real steps."""

    id: str
    actions: list[str]
    real: int = 0


class Game:
    """Worlds that start from one context, controlled by command lines."""

    def __init__(self, client: Client, start: Json, write: Callable[[str], None], read: Callable[[], str]) -> None:
        """Create the first world. Raises WorldError.

        write: receives output line by line.
        read: returns the next line of a text.
        """
        self._client = client
        self._write = write
        self._read = read
        body = {name: value for name, value in start.items() if name in FIELDS}
        if start.get("observations") is None:  # an exported world: its actions have been imagined
            body |= {name: value for name, value in start.items() if name in ("actions", "steps_cut")}
        world = client.call("POST", "worlds", {"model": client.model(), **body})
        with naming("--world: actions, observations: ", TypeError):
            self._recorded = list(zip(start.get("actions") or (), start.get("observations") or (), strict=False))
        self._branches, self._current = [Branch(world["id"], list(body.get("actions") or ()))], 0
        for warning in world["warnings"]:
            self._say(f"warning: {warning}")

    @property
    def prompt(self) -> str:
        return f"world {self._current + 1}> "

    def command(self, line: str) -> None:
        """Run a command. Raises InputError or WorldError, without a change."""
        word, _, rest = line.strip().partition(" ")
        without_argument: dict[str, Callable[[], None]] = {
            "fork": self._fork, "worlds": self._worlds, "truth": self._truth, "help": self._help,
        }  # fmt: skip
        with_argument: dict[str, Callable[[str], None]] = {
            "act": self._act, "observe": self._observe, "plan": self._plan, "world": self._use,
        }  # fmt: skip
        if word in without_argument and not rest:
            without_argument[word]()
        elif word in with_argument:
            with_argument[word](rest.strip())
        elif word:
            self._act(line)

    @property
    def _branch(self) -> Branch:
        return self._branches[self._current]

    def _say(self, line: str) -> None:
        self._write(line + "\n")

    def _post(self, endpoint: str, body: Json) -> Json:
        return self._client.call("POST", f"worlds/{self._branch.id}/{endpoint}", body)

    def _act(self, text: str) -> None:
        actions = _actions(text)
        reply = self._post("step", {"actions": actions, "decode": "each"})
        self._branch.actions += actions
        for step in reply["steps"]:
            self._say(step["observation"])
            facts = f"{step['loops']} loops to advance"
            if step["reward"] is not None:
                facts = f"reward {step['reward']:.1f}, goes on {step['continuation']:.0%}, {facts}"
            self._say(f"  [{facts}, {reply['usage']['loops']['decode']:.1f} a token]")

    def _observe(self, action: str) -> None:
        if not action:
            raise InputError("observe: must be followed by an action")
        self._say(f"enter the observation; end it with a line of {END_OF_TEXT!r}:")
        self._post("observe", {"action": action, "observation": "\n".join(iter(self._read, END_OF_TEXT))})
        branch = self._branch
        branch.actions[branch.real :] = [action]
        branch.real += 1
        self._say("added; imagined steps since the last real observation are dropped")

    def _plan(self, text: str) -> None:
        candidates = [_actions(candidate) for candidate in text.split("|")]
        reply = self._post("plan", {"candidates": candidates})
        for i, (actions, candidate) in enumerate(zip(candidates, reply["candidates"], strict=True)):
            self._say(f"{'*' if i == reply['best'] else ' '} {candidate['score']:8.2f}  {'; '.join(actions)}")
        self._say(reply["observation"])

    def _truth(self) -> None:
        actions = self._branch.actions
        if not actions or [action for action, _ in self._recorded[: len(actions)]] != actions:
            raise InputError("truth: nothing is recorded for these actions")
        self._say(self._recorded[len(actions) - 1][1])

    def _fork(self) -> None:
        (fork,) = self._post("fork", {"count": 1})["data"]
        self._branches.append(Branch(fork["id"], list(self._branch.actions), self._branch.real))
        self._current = len(self._branches) - 1
        self._say(f"now in world {self._current + 1}")

    def _worlds(self) -> None:
        for i, branch in enumerate(self._branches):
            self._say(f"{'*' if i == self._current else ' '} {i + 1}  {'; '.join(branch.actions) or '(no actions)'}")

    def _use(self, number: str) -> None:
        if not number.isdecimal() or not 1 <= int(number) <= len(self._branches):
            raise InputError(f"world: must be a number from 1 to {len(self._branches)}, got {number!r}")
        self._current = int(number) - 1

    def _help(self) -> None:
        self._say(HELP)
        if self._recorded:
            self._say(f"the example's actions: {'; '.join(action for action, _ in self._recorded)}")


def _actions(text: str) -> list[str]:
    actions = [action.strip() for action in text.split(";") if action.strip()]
    if not actions:
        raise InputError("action: must not be empty; see help")
    return actions


def build_parser() -> argparse.ArgumentParser:
    parser = doc_parser("python -m serve play", __doc__, EXAMPLE + "\n\n" + HELP)
    add_arguments(parser)
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--example", metavar="NAME", help=f"one of {', '.join(_examples())}; default: the first")
    start.add_argument("--world", type=Path, metavar="FILE", help="JSON with goal, observation and an optional history")
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    try:
        start = _start(args)
        with connected(args) as client:
            game = Game(client, start, partial(print, end="", flush=True), input)
            print(start["goal"], start["observation"], sep="\n\n")  # validated by the service
            for step in start.get("history") or ():
                print(f"> {step['action']}", step["observation"], sep="\n")
            play(game)
    except (InputError, WorldError, EOFError) as error:
        print(f"error: {str(error) or 'the input ended within a text'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def play(game: Game) -> None:
    """Run commands from standard input until its end or `quit`. Errors are printed."""
    interactive = sys.stdin.isatty()
    if interactive:
        print("help lists the commands")
    while True:
        try:
            line = input(game.prompt if interactive else "")
        except EOFError:
            return
        if line.strip() == "quit":
            return
        try:
            game.command(line)
        except (InputError, WorldError) as error:
            print(f"error: {error}")


def _start(args: argparse.Namespace) -> Json:
    if args.world is not None:
        if not isinstance(start := read_json(args.world), dict):
            raise InputError(f"--world: {args.world} must contain a JSON object")
        return start
    examples = _examples()
    name = args.example or next(iter(examples))
    if name not in examples:
        raise InputError(f"--example: must be one of {', '.join(examples)}, got {name!r}")
    return examples[name]


def _examples() -> dict[str, Json]:
    return {example["name"]: example for example in read_json(EXAMPLES)}
