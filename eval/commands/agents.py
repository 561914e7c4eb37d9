"""Agents that act on text alone: what they were told and saw, in a real world or an imagined one.

`retrieval-agent` does what train episodes did in the most similar place, by BM25. A place is described by the goal
(words and pairs of them), the last actions (as whole strings) and the last observation. How was chosen on dev
variations, in the real world.
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
from eval.models.train_episodes import EXPERTS
from loopwm.records.episodes import TRAIN_SPLITS, succeeded
from loopwm.records.errors import InputError
from loopwm.records.files import sha256
from loopwm.records.template import Context, Transition
from loopwm.records.windows import Episode

RECALLED_ACTIONS = 6
"""How many actions back describe a place."""

REFUSALS = frozenset(
    {
        "No known action matches that input.",
        "It's not clear how to get there from here.",
        "Nothing happens.",
    }
)
"""What environments answer to an action that changed nothing."""

_WORD = re.compile(r"[a-z0-9]+")


class Agent(Protocol):
    """A policy. The same context always gets the same answer."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What decides its actions; part of a run's provenance."""
        ...

    def act(self, context: Context) -> str | None:
        """The next action; None where it believes to have finished."""
        ...


@dataclass(frozen=True)
class Recalled:
    """A place of a train episode. similarity: its BM25 score. after: what was done and seen there until the end."""

    similarity: float
    after: tuple[Transition, ...]

    @property
    def action(self) -> str | None:
        """What was done next; None at the end of the episode."""
        return self.after[0].action if self.after else None


class RetrievalAgent:
    """Takes the action that followed the most similar place of a successful expert train episode.

    A refused action did not change the place, so the agent goes on from where it was, without that action. Nor does it
    repeat what it did before in the very same place (after the same action and observation). It stops where the most
    similar place is the end of an episode.
    """

    def __init__(self, episodes: Iterable[Episode]) -> None:
        """Raises InputError for an episode that is not of the train split, or if no expert's succeeded."""
        chosen = [episode for episode in map(_of_train, episodes) if _is_example(episode)]
        if not chosen:
            raise InputError("--agent-episodes: none in which an expert succeeded")
        places = [place for episode in chosen for place in _places(episode)]
        whole = [_transitions(episode) for episode in chosen]
        self._steps = [(steps, now) for steps in whole for now in range(len(steps) + 1)]
        import bm25s  # not needed by the other commands

        self._index = bm25s.BM25()
        self._index.index([terms for terms, _ in places], show_progress=False)
        self._hash = sha256(json.dumps(places))

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {"agent_places_sha256": self._hash}

    def act(self, context: Context) -> str | None:
        return next((place.action for place in self.recall(context)), None)

    def recall(self, context: Context) -> Iterator[Recalled]:
        """The places whose action is not excluded, the most similar first."""
        steps = [step for step in context.history if not is_refusal(step.observation)]
        scores = self._index.get_scores(_describe(context.goal, context.observation, steps))
        excluded = _excluded(context, steps)
        for place in np.argsort(-scores, kind="stable"):
            whole, now = self._steps[place]
            if (whole[now].action if now < len(whole) else None) not in excluded:
                yield Recalled(float(scores[place]), whole[now:])


def _of_train(episode: Episode) -> Episode:
    if episode.split not in TRAIN_SPLITS:
        raise InputError(f"--agent-episodes: split: {episode.split!r} in {episode.task}, agents learn from train alone")
    return episode


def _is_example(episode: Episode) -> bool:
    return episode.policy in EXPERTS and succeeded(episode)


def _places(episode: Episode) -> Iterator[tuple[list[str], str | None]]:
    """(description, what was done there) after every step; None at the end."""
    steps = _transitions(episode)
    actions: list[str | None] = [*(step.action for step in steps), None]
    for now, action in enumerate(actions):
        yield _describe(episode.goal, episode.steps[0].observation, steps[:now]), action


def _transitions(episode: Episode) -> tuple[Transition, ...]:
    return tuple(Transition(step.action or "", step.observation) for step in episode.steps[1:])


def _describe(goal: str, first: str, steps: Sequence[Transition]) -> list[str]:
    """Terms; a mark before each tells where it stands."""
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
    """What was refused since the last step that was not, and what was done before in the same place.

    A refusal means that the goal is not reached yet, so stopping is excluded with it.
    """
    taken = {after.action for before, after in pairwise(steps) if before == steps[-1]}
    excluded: set[str | None] = {*taken}
    for step in reversed(context.history):
        if not is_refusal(step.observation):
            break
        excluded |= {step.action, None}
    return excluded


class Chat(Protocol):
    """A chat model: messages of `role` and `content` in, the reply out."""

    def complete(self, messages: Sequence[Message]) -> str: ...


class ChatAgent:
    """A chat model asked for one action at a time, shown one example: the successful train episode of an expert whose
    goal shares the most words with the agent's."""

    STOP = "finished"

    def __init__(self, chat: Chat, episodes: Iterable[Episode]) -> None:
        self._chat = chat
        self._examples = [episode for episode in map(_of_train, episodes) if _is_example(episode)]
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
        """Observations (user) and actions (assistant) in turn; the first also tells the task and the example."""
        told = (
            "You act in a text environment. Answer with your next action alone, in one line and in the wording of the "
            f"example. When the goal is reached, answer: {self.STOP}\n\n{self._example(context.goal)}"
            f"Goal: {context.goal}\n\n{context.observation}"
        )
        messages: list[Message] = [{"role": "user", "content": told}]
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
