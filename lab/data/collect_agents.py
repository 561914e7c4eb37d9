"""Policy `agent`, and its collection: a retrieval agent's mistakes, such as names and steps of other games."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from zlib import crc32

from data_prep import collect
from data_prep.environments.base import Environment
from data_prep.policies import FATAL, POLICIES, Play, Policy, Walk, draw_key
from lab.agents.agents import RetrievalAgent
from lab.studies.planner import candidate_plans
from loopwm.records.episodes import recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.template import Context
from loopwm.worlds.protocol import longer

EXAMPLE = (
    "python -m lab collect-agents scienceworld --split train --episodes-per-task 100 --max-steps 40 "
    "--agent-episodes data/episodes/scienceworld-gold --out data/episodes/scienceworld-agent"
)

CANDIDATES = 16
"""Different actions that a decision chooses among."""

MOST_STRAYS = 0.6
"""Greatest share of decisions that do not take the first candidate; each episode draws its own."""

STRAYS = {"candidate": 8, "misused candidate": 3, "again": 1, "misuse": 1}
"""Kinds of stray and their weights. misused candidate: of a verb that may end the episode; again: one taken before."""


class Agents:
    """Two agents, each of one half of the variations; a variation is played by the agent that has not seen it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def act(self, environment: Environment, gold: Sequence[str], rng: Random) -> Play:
        """Take recalled actions, at times not the first one, until the agent or the world stops."""
        agent = _agent(tuple(self._paths), 1 - _half(environment.loaded()[1]))
        rate = rng.uniform(0, MOST_STRAYS)
        walk = Walk(environment, rng)
        yield from walk.follow(environment.looks[:1])  # a policy is not sent step 0
        context = Context(environment.goal(), walk.step.observation)
        while action := _draw(agent, environment, context, rng, rate):
            yield from walk.follow([action])
            context = longer(context, action, walk.step.observation)


def _draw(agent: RetrievalAgent, environment: Environment, context: Context, rng: Random, rate: float) -> str | None:
    """Draw an action, the first candidate if the drawn kind of stray has none. None where the agent stops."""
    candidates = [plan.action or "" for plan in candidate_plans(agent, context, CANDIDATES)]
    if not candidates or rng.random() >= rate:
        return next(iter(candidates), None)
    strays = list(_strays(draw_key(STRAYS, rng), candidates, environment, context))
    return rng.choice(strays) if strays else candidates[0]


def _strays(kind: str, candidates: Sequence[str], environment: Environment, context: Context) -> Iterator[str]:
    if kind == "candidate":
        yield from candidates
        return
    known = [step.action for step in context.history] if kind == "again" else candidates
    if kind == "misuse":
        known = sorted(environment.valid_actions())
    yield from (action for action in known if action.split()[0] in FATAL)


@cache
def _agent(paths: tuple[Path, ...], half: int) -> RetrievalAgent:
    return RetrievalAgent(episode for episode in recorded_episodes(paths) if _half(episode.variation) == half)


def _half(variation: int | str) -> int:
    return crc32(str(variation).encode()) % 2


def register(paths: Sequence[Path]) -> None:
    """Make the policy known to `data_prep.collect`, in this process."""
    POLICIES["agent"] = Policy("agent", Agents(paths).act, needs_gold=False, repeatable=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    register([])
    collect.add_arguments(parser)
    parser.add_argument(
        "--agent-episodes", type=Path, nargs="+", required=True, metavar="FILE", help="episodes of experts to recall"
    )
    parser.set_defaults(policy="agent")


def run(args: argparse.Namespace) -> None:
    if args.dask:
        raise InputError("--dask: not supported here; use --workers and --shard")
    collect.run(args, partial(register, args.agent_episodes))
