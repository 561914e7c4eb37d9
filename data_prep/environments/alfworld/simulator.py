"""ALFWorld's game engine, TextWorld with Fast Downward, as a program that reads and writes lines of JSON.

    {"call": "load", "arguments": [game]}       -> {"result": step}      game: the fields of a `game.tw-pddl`
    {"call": "step", "arguments": ["look"]}     -> {"result": step}      step: observation, won, look, inventory
    {"call": "commands" | "facts", "arguments": []} -> {"result": [...]}    valid commands; [predicate, name, ...]

A failed call replies {"error": "one line"}. The engine runs in its own process because it may hang, exit, print, and
change `sys.argv`. TextWorld's own environment grounds a game twice at each reset and derives the text of every command
at each step, from its grammar; here a game is grounded once, and a command's text is filled in.
"""

from __future__ import annotations

import json
import os
import sys
from copy import deepcopy
from functools import lru_cache
from typing import Any

GROUNDED_GAMES = 8
"""Games cached grounded, some megabytes each."""

PARSED_TEXTS = 4096
"""Pieces of grammar cached parsed."""


def make_engine() -> Any:
    """Create TextWorld's PDDL environment without its slow parts. Raises ModuleNotFoundError without the package."""
    import fast_downward
    from alfworld.agents.utils.misc import Demangler
    from textworld.envs import PddlEnv
    from textworld.envs.pddl import textgen
    from textworld.generator.game import EntityInfo
    from textworld.logic import Placeholder, Rule, Variable

    ground = lru_cache(GROUNDED_GAMES)(fast_downward.pddl2sas)
    # The second grounding, with `optimize`, only serves replanning, which is not used here.
    fast_downward.pddl2sas = lambda domain, problem, verbose=False, optimize=False: ground(domain, problem)
    Rule.parse_conjunctive_query = lru_cache(PARSED_TEXTS)(Rule.parse_conjunctive_query)
    parse = lru_cache(PARSED_TEXTS)(textgen._parse_and_convert)
    # copied, because the symbols of a sentence hold its context
    textgen._parse_and_convert = lambda *texts, **options: deepcopy(parse(*texts, **options))
    for unchanging in (EntityInfo, Placeholder, Variable):  # the grammar copies them again and again
        unchanging.__deepcopy__ = lambda self, memo: self

    class Engine(PddlEnv):
        def load(self, game: dict[str, str]) -> None:
            super().load(game)
            names = Demangler(game_infos=self._entity_infos)
            for info in self._entity_infos.values():
                info.name = names.demangle_alfred_name(info.id).strip()
            self.names = {key: info.name for key, info in self._entity_infos.items()}
            # The grammar's template looks up the receptacle at the place; the action already names it.
            self._logic.actions["gotolocation"].template = "go to {r}"

        def _gather_infos(self) -> None:
            actions = self._pddl_state.all_applicable_actions()
            self.state["won"], self.state["lost"] = self._pddl_state.check_goal(), False
            self.state["_valid_actions"] = actions
            self.state["_valid_commands"] = [self._command(action) for action in actions]

        def _command(self, action: Any) -> str:
            names = {placeholder.name: self.names[v.name] for placeholder, v in action.mapping.items()}
            return str(action.command_template.format(**names))

        def facts(self) -> list[list[str]]:
            """Return all facts, with the names shown to players."""
            return sorted([f.name, *(self.names[v.name] for v in f.arguments)] for f in self._pddl_state.facts)

        def derive(self, rule: str, **entities: str) -> str:
            """Return the grammar's text of a rule, its gaps filled by receptacles' ids."""
            context = {
                "state": self._pddl_state,
                "facts": [],
                "variables": {gap: self._entity_infos[key] for gap, key in entities.items()},
                "mapping": {Placeholder(g, "receptacle"): Variable(key, "receptacle") for g, key in entities.items()},
                "entity_infos": self._entity_infos,
            }
            return str(self._logic.grammar.derive(f"#{rule}.feedback#", context))

        def receptacles_here(self) -> list[str]:
            facts = list(self._pddl_state.facts)
            here = {fact.arguments[1].name for fact in facts if fact.name == "atlocation"}
            at = [fact.arguments for fact in facts if fact.name == "receptacleatlocation"]
            return sorted(receptacle.name for receptacle, place in at if place.name in here)

    return Engine()


class Simulator:
    def __init__(self) -> None:
        self.engine = make_engine()
        self.game: dict[str, str] | None = None
        self.room = ""

    def load(self, game: dict[str, str]) -> dict[str, Any]:
        """Restart a game and return its first step. A game that is loaded already is not grounded again."""
        if game != self.game:
            self.game = None
            self.engine.load(game)
            self.game = game
        state = self.engine.reset()
        self.room = self.engine.derive("look")
        return self._step(state)

    def step(self, command: str) -> dict[str, Any]:
        """Return the result of a command. An invalid one changes nothing."""
        return self._step(self.engine.step(command)[0])

    def commands(self) -> list[str]:
        return sorted(set(self.engine.state["_valid_commands"]))

    def facts(self) -> list[list[str]]:
        """Return all true facts, each as predicate and names."""
        return list(self.engine.facts())

    def _step(self, state: Any) -> dict[str, Any]:
        here = self.engine.receptacles_here()
        views = [self.engine.derive("examineReceptacle", r=receptacle) for receptacle in here]
        return {
            "observation": state.feedback,
            "won": bool(state["won"]),
            "look": "\n".join([self.engine.derive("look"), *views]) if here else self.room,
            "inventory": self.engine.derive("inventory"),
        }


def serve() -> None:
    """Answer requests until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the engine prints, which must not mix with the replies
    simulator: Simulator | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            simulator = simulator or Simulator()
            reply = {"result": getattr(simulator, request["call"])(*request["arguments"])}
        except (Exception, SystemExit) as error:  # the planner's parser exits on invalid input
            text = " ".join(str(error).split())
            reply = {"error": f"{type(error).__name__}: {text}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve()
