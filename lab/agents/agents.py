"""Agents that act on text only, in a real or an imagined world.

`retrieval-agent` takes the action that train episodes took in the most similar place, by BM25. A place is described by
the goal (words and word pairs), the last actions (as whole strings) and the last observation. The description was
chosen on dev variations, in the real world.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from eval.models.fewshot import Message
from lab.episodes import train_only
from loopwm.records.episodes import Episode
from loopwm.records.errors import InputError
from loopwm.records.files import sha256
from loopwm.records.template import Context, Transition

FULL_SCORE = 100

EXPERTS = ("gold", "expert")
RECALLED_ACTIONS = 6
"""Number of past actions that describe a place."""

REFUSALS = frozenset(
    {
        "No known action matches that input.",
        "It's not clear how to get there from here.",
        "Nothing happens.",
    }
)
"""Answers of environments to an action that changed nothing."""

_WORD = re.compile(r"[a-z0-9]+")


class Agent(Protocol):
    """Policy that returns the same action for the same context."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """Return what decides its actions, for a run's provenance."""
        ...

    def act(self, context: Context) -> str | None:
        """Return the next action, or None to stop."""
        ...


@dataclass(frozen=True)
class Recalled:
    """Place of a train episode. similarity: BM25 score. after: the remaining transitions of the episode."""

    similarity: float
    after: tuple[Transition, ...]

    @property
    def action(self) -> str | None:
        """Return the next action of the episode, or None at its end."""
        return self.after[0].action if self.after else None


class RetrievalAgent:
    """Take the action that followed the most similar place of a successful expert train episode.

    A refused action does not change the place, so it is dropped from the history and excluded from the next choice.
    Actions taken before in the same place (after the same action and observation) are excluded too. The agent stops
    where the most similar place is the end of an episode.
    """

    def __init__(self, episodes: Iterable[Episode]) -> None:
        """Index the episodes. Raises InputError for one outside the train split, or if no expert succeeded."""
        chosen = [episode for episode in train_only(episodes, "--agent-episodes") if _is_example(episode)]
        if not chosen:
            raise InputError("--agent-episodes: must hold a successful episode of an expert, found none")
        places = [place for episode in chosen for place in _places(episode)]
        whole = [_transitions(episode) for episode in chosen]
        self._steps = [(steps, now) for steps in whole for now in range(len(steps) + 1)]
        import bm25s  # imported late: the other commands run without it

        self._index = bm25s.BM25()
        self._index.index([terms for terms, _ in places], show_progress=False)
        self._hash = sha256(json.dumps(places))

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {"agent_places_sha256": self._hash}

    def act(self, context: Context) -> str | None:
        return next((place.action for place in self.recall(context)), None)

    def recall(self, context: Context) -> Iterator[Recalled]:
        """Yield the places whose action is not excluded, the most similar first."""
        steps = [step for step in context.history if not is_refusal(step.observation)]
        scores = self._index.get_scores(_describe(context.goal, context.observation, steps))
        excluded = _excluded(context, steps)
        for place in np.argsort(-scores, kind="stable"):
            whole, now = self._steps[place]
            if (whole[now].action if now < len(whole) else None) not in excluded:
                yield Recalled(float(scores[place]), whole[now:])


def _is_example(episode: Episode) -> bool:
    last = episode.steps[-1]
    return episode.policy in EXPERTS and last.done and last.score >= FULL_SCORE


def _places(episode: Episode) -> Iterator[tuple[list[str], str | None]]:
    """Yield (description, next action) after every step; the action is None at the end."""
    steps = _transitions(episode)
    actions: list[str | None] = [*(step.action for step in steps), None]
    for now, action in enumerate(actions):
        yield _describe(episode.goal, episode.steps[0].observation, steps[:now]), action


def _transitions(episode: Episode) -> tuple[Transition, ...]:
    return tuple(Transition(step.action or "", step.observation) for step in episode.steps[1:])


def _describe(goal: str, first: str, steps: Sequence[Transition]) -> list[str]:
    """Return the terms of a place; a prefix of each names its field."""
    words = _words(goal)
    terms = [f"goal:{word}" for word in words] + [f"goal:{left} {right}" for left, right in pairwise(words)]
    terms += [f"done={step.action}" for step in steps[-RECALLED_ACTIONS:]]
    terms += [f"last:{word}" for word in _words(steps[-1].action)] if steps else ["start"]
    return terms + [f"seen:{word}" for word in _words(steps[-1].observation if steps else first)]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def is_refusal(observation: str) -> bool:
    return observation.strip() in REFUSALS


def _excluded(context: Context, steps: Sequence[Transition]) -> set[str | None]:
    """Return the actions refused since the last accepted step and those taken before in the same place.

    A refusal means that the goal is not reached yet, so stopping is excluded too.
    """
    taken = {after.action for before, after in pairwise(steps) if before == steps[-1]}
    excluded: set[str | None] = {*taken}
    for step in reversed(context.history):
        if not is_refusal(step.observation):
            break
        excluded |= {step.action, None}
    return excluded


class Chat(Protocol):
    """Chat model: messages of `role` and `content` in, reply out."""

    def complete(self, messages: Sequence[Message]) -> str: ...


class ChatAgent:
    """Ask a chat model for one action at a time, with one example.

    The example is the successful expert train episode whose goal shares the most words with the agent's.
    """

    STOP = "finished"

    def __init__(self, chat: Chat, episodes: Iterable[Episode]) -> None:
        self._chat = chat
        self._examples = [episode for episode in train_only(episodes, "--agent-episodes") if _is_example(episode)]
        texts = [(e.goal, *((step.action, step.observation) for step in e.steps)) for e in self._examples]
        self._hash = sha256(json.dumps(texts))

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {"agent_examples_sha256": self._hash}

    def act(self, context: Context) -> str | None:
        lines = self._chat.complete(self.messages(context)).strip().splitlines()
        action = lines[0].strip() if lines else ""
        return None if action.rstrip(".").lower() in ("", self.STOP) else action

    def messages(self, context: Context) -> list[Message]:
        """Return observations (user) and actions (assistant) in turn; the first holds the task and the example too."""
        instruction = (
            "You act in a text environment. Answer with your next action alone, in one line and in the wording of the "
            f"example. When the goal is reached, answer: {self.STOP}\n\n{self._example(context.goal)}"
            f"Goal: {context.goal}\n\n{context.observation}"
        )
        messages: list[Message] = [{"role": "user", "content": instruction}]
        for step in context.history:
            messages.append({"role": "assistant", "content": step.action})
            messages.append({"role": "user", "content": step.observation})
        return messages

    def _example(self, goal: str) -> str:
        if not self._examples:
            return ""
        words = set(_words(goal))
        best = max(self._examples, key=lambda e: len(words & set(_words(e.goal))) / len(words | set(_words(e.goal))))
        lines = "".join(f"> {step.action}\n{step.observation}\n" for step in best.steps[1:])
        return f"An example.\nGoal: {best.goal}\n{best.steps[0].observation}\n{lines}> {self.STOP}\n\n"
