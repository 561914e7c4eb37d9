"""Play an agent in the real world, in an imagined one, and replay its imagined actions in the real one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from eval.scores.predictions import drop_torn_line
from lab.agents.agents import FULL_SCORE, Agent
from lab.agents.real_world import Game, RealWorld
from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines
from loopwm.records.template import Context, ContextKind
from loopwm.worlds.protocol import Worlds, longer

WON_FROM = FULL_SCORE / 2
"""Points, summed over an imagined episode that ended, from which it counts as won: closer to all than to none."""


Plays = dict[str, dict[str, Any]]
"""Lines of plays.jsonl by the name of the game."""
PLAYS = "plays.jsonl"


@dataclass
class Play:
    """One episode. done: the world ended it. stopped: the agent ended it.

    score: points at the end; in an imagined world the sum of predicted rewards, None if it predicts none.
    """

    actions: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    score: float | None = 0.0
    done: bool = False
    stopped: bool = False

    @property
    def over(self) -> bool:
        return self.done or self.stopped


def won(play: Play) -> bool:
    """Return True if the world ended the episode with full score."""
    return play.done and play.score is not None and play.score >= FULL_SCORE


def won_as_imagined(play: Play) -> bool:
    """Return True if an imagined episode counts as won: by predicted rewards and ends, else by the agent's stop."""
    if play.score is None:
        return play.stopped
    return play.done and play.score >= WON_FROM


def play_real(agent: Agent, world: RealWorld, game: Game, max_steps: int) -> Play:
    context, play = world.start(game, "observed"), Play()
    while not play.over and len(play.actions) < max_steps:
        action = agent.act(context)
        if action is None:
            play.stopped = True
        else:
            _take(play, world, action)
            context = longer(context, action, play.observations[-1])
    return play


def replay(world: RealWorld, game: Game, actions: Sequence[str]) -> Play:
    """Replay the actions in the real world until the episode ends."""
    world.start(game, "observed")
    play = Play()
    for action in actions:
        if not play.done:
            _take(play, world, action)
    return play


def _take(play: Play, world: RealWorld, action: str) -> None:
    step = world.step(action)
    play.actions.append(action)
    play.observations.append(step.observation)
    play.score, play.done = step.score, step.done


def play_imagined(agent: Agent, worlds: Worlds, judges: bool, starts: Sequence[Context], max_steps: int) -> list[Play]:
    """Play from every start in one batch. The agent sees goal and texts only; the model, all of the start.

    judges: True if the model predicts rewards and ends.
    """
    contexts, rows = list(starts), list(range(len(starts)))
    plays = [Play(score=0.0 if judges else None) for _ in starts]
    worlds.begin(starts)
    for _ in range(max_steps):
        chosen = {i: agent.act(_seen(contexts[i])) for i, play in enumerate(plays) if not play.over}
        taken = {i: action for i, action in chosen.items() if action is not None}
        for i in chosen.keys() - taken.keys():
            plays[i].stopped = True
        if not taken:
            break
        if len(taken) < len(rows):
            worlds, rows = worlds.fork([rows.index(i) for i in taken]), list(taken)
        actions = list(taken.values())
        steps = worlds.step(actions)
        worlds.observe(actions, [step.observation for step in steps])
        for (i, action), step in zip(taken.items(), steps, strict=True):
            play = plays[i]
            play.actions.append(action)
            play.observations.append(step.observation)
            if play.score is not None and step.reward is not None and step.continuation is not None:
                play.score += step.reward
                play.done = step.ends
            contexts[i] = longer(contexts[i], action, step.observation)
    return plays


def _seen(context: Context) -> Context:
    return Context(context.goal, context.observation, context.history)


def start_all(world: RealWorld, games: Sequence[Game], context_kind: ContextKind) -> list[Context]:
    return [world.robustly(game, partial(world.start, game, context_kind)) for game in games]


def read_plays(path: Path, parts: Iterable[str]) -> Plays:
    """Read the games played so far and drop a torn last line.

    Raises InputError for a line without its game, its task, or one of these parts.
    """
    if not path.exists():
        return {}
    drop_torn_line(path)
    plays: Plays = {}
    for number, record in read_json_lines(path):
        if missing := {"game", "task", *parts} - record.keys():
            raise InputError(f"{path}: line {number}: {sorted(missing)[0]}: missing")
        plays[record["game"]] = record
    return plays
