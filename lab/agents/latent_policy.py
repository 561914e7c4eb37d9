"""A policy on a world model's latents: each action is scored by the latent of what it would bring, imagined.

The world model is frozen. What it read and the tokens of each action, with the slot behind them, are attended to as by
`RewardAttention`, whose weights the policy starts from; what the heads predict of each action is added. That the goal
names an action's thing or place is told: few demonstrations do not teach to compare words. Ours, not the paper's.

Shape suffixes: B states, N actions, L positions read, M positions of an action, D width, H heads, E head width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lab.agents.searcher import APPLIANCES, NAME, Known, kind_of
from loopwm.core.block import AttentionInputs, rotary_angles
from loopwm.records.template import Context, ContextTooLongError
from loopwm.text.model.heads import MOST_POINTS
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.world import World, WorldModel
from loopwm.worlds.protocol import longer

WIN = 50
"""Points from which a reward of ALFWorld is a win: all or nothing."""

LEAST = torch.finfo(torch.float32).min / 4
"""Score of what is masked."""

NAMED_SIZE = 0.3
"""Standard deviation of what is added where a goal names an action's thing or place, at first."""

PREDICTED = (3.0, 0.0, 1.0)
"""Initial weights of what is predicted of an action: that it wins, that the episode continues, that it is accepted."""


def actions_in_reach(context: Context) -> list[str]:
    """Return the commands of ALFWorld that what was observed allows, but those that only look or close something."""
    known = Known.of(context)
    here, held = known.here, known.held
    actions = [f"go to {place}" for place in known.places if place != here]
    if here is None:
        return actions
    shut, things = here in known.closed, known.contents.get(here, [])
    near = [f"open {here}"] if shut else []
    if held is not None:
        near += [f"{verb} {held} with {here}" for verb, kind in APPLIANCES.items() if kind_of(here) == kind]
        near += [] if shut else [f"move {held} to {here}"]
    elif not shut:
        near += [f"take {thing} from {here}" for thing in things]
    near += [f"use {thing}" for thing in things if kind_of(thing) == "desklamp"]
    return near + actions


def named_in(goal: str, action: str) -> int:
    """Return 1 if a goal names the thing of an action, 2 if its place (or what is used), 3 if both, else 0."""
    words, kinds = set(re.findall(r"[a-z]+", goal)), [kind_of(name) for name in NAME.findall(action)]
    *thing, place = kinds
    return int(any(kind in words for kind in thing)) + 2 * int(place in words)


@dataclass(frozen=True)
class Choice:
    """Actions of one state, as the frozen model imagines them.

    read: what was read so far, in parts (L, 2 D): h^(T) and h. after: (N, M, 2 D), the same of each action's tokens and
    its slot, which is the last; padded in front. tokens: (N,) positions that are no padding. predicted: (N, 3) as
    `PREDICTED`. named: (N,) as of `named_in`.
    """

    actions: Sequence[str]
    read: Sequence[Tensor]
    after: Tensor
    tokens: Tensor
    predicted: Tensor
    named: Tensor


@dataclass(frozen=True)
class Choices:
    """Choices, padded.

    read: (B, L, 2 D). length: (B,). after: (B, N, M, 2 D). tokens, real, named: (B, N). predicted: (B, N, 3).
    """

    read: Tensor
    length: Tensor
    after: Tensor
    tokens: Tensor
    real: Tensor
    predicted: Tensor
    named: Tensor

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Choices:
        read = [torch.cat(list(choice.read)).float() for choice in choices]
        most, longest = (max(choice.after.shape[i] for choice in choices) for i in (0, 1))

        def padded(rows: Tensor) -> Tensor:
            return F.pad(rows, (*[0, 0] * (rows.ndim - 1), 0, most - len(rows)))

        after = [F.pad(choice.after.float(), (0, 0, longest - choice.after.shape[1], 0)) for choice in choices]
        tokens = torch.stack([padded(choice.tokens) for choice in choices])
        return cls(
            pad_sequence(read, batch_first=True),
            torch.tensor([len(row) for row in read]),
            torch.stack([padded(row) for row in after]),
            tokens,
            tokens > 0,
            torch.stack([padded(choice.predicted) for choice in choices]),
            torch.stack([padded(choice.named) for choice in choices]),
        )


class Reading:
    """An episode as the frozen model reads it. A copy goes on by itself."""

    def __init__(self, model: WorldModel, context: Context) -> None:
        self._model, self.context = model, Context(context.goal, context.observation)
        with _latents_of(model.model) as latents:
            self._world = model.encode([self.context])
        self._read: tuple[Tensor, ...] = (latents[0][0],)  # the slot's own pass comes second
        for step in context.history:
            self.observe(step.action, step.observation)

    def observe(self, action: str, observation: str) -> None:
        """Read a step. Raises ContextTooLongError."""
        with _latents_of(self._model.model) as latents:
            self._world = self._model.observe(self._world, [action], [observation])
        self._read = (*self._read, latents[0][0])
        self.context = longer(self.context, action, observation)

    def look(self, actions: Sequence[str]) -> tuple[World, Choice]:
        """Imagine each action alone; nothing is decoded. Return their worlds, a row each, and the choice."""
        lm = self._model.model
        with _latents_of(lm) as latents:
            worlds = self._model.advance(self._world.select([0] * len(actions)), actions)
        assert lm.model.heads is not None
        points, continuation, acceptance = lm.model.heads(worlds.latent)
        win = points.float().softmax(-1)[:, MOST_POINTS + WIN :].sum(-1)
        predicted = torch.stack([win, continuation.float().sigmoid(), acceptance.float().sigmoid()], -1)
        tokens = torch.tensor([len(self._model.action_ids(action)) - 1 for action in actions])  # `<|obs|>` is no part
        named = torch.tensor([named_in(self.context.goal, action) for action in actions])
        return worlds, Choice(actions, self._read, latents[0], tokens, predicted, named)


@contextmanager
def _latents_of(lm: LoopWMForCausalLM) -> Iterator[list[Tensor]]:
    """Collect h^(T) and h of each pass within, (B, L, 2 D) in half precision."""
    passes = list[Tensor]()

    def keep(module: nn.Module, inputs: Any, out: Any) -> None:
        passes.append(torch.cat([out.state, out.latent[..., : lm.config.hidden_size]], -1).half())

    hook = lm.model.register_forward_hook(keep)
    try:
        yield passes
    finally:
        hook.remove()


class LatentPolicy(nn.Module):
    """Score the actions of states by attention from each action's slot to what was read and to its own tokens."""

    def __init__(self, lm: LoopWMForCausalLM) -> None:
        """Start from the model's reward attention, which the model must have."""
        super().__init__()
        assert lm.model.reward_attention is not None
        assert lm.model.heads is not None
        assert lm.model.heads.outcome is not None
        self.attention, self.layer = deepcopy(lm.model.reward_attention), deepcopy(lm.model.heads.outcome)
        self.score = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.score.weight)
        self.of_named = nn.Embedding(4, lm.config.hidden_size)
        nn.init.normal_(self.of_named.weight, std=NAMED_SIZE)
        self.of_predicted = nn.Parameter(torch.tensor(PREDICTED))
        self._config = lm.config
        self.requires_grad_(True)

    def forward(self, choices: Choices) -> Tensor:
        """Return logits (B, N); those of padding are the least."""
        count, positions = choices.after.shape[1:3]
        back = torch.arange(positions) - positions
        read_positions = torch.arange(choices.read.shape[1])[None]
        own_positions = (choices.length[:, None, None] + choices.tokens[..., None] + back).clamp(min=0).flatten(0, 1)
        own = choices.after.flatten(0, 1)
        h, angles = _h_and_state(own)[0][:, -1:], self._angles(own_positions)
        q = self.attention.queries(h, *(part[..., -1:, :] for part in angles))[:, :, 0]
        shared = self.attention.keys_values(*_h_and_state(choices.read), AttentionInputs(*self._angles(read_positions)))
        separate = self.attention.keys_values(*_h_and_state(own), AttentionInputs(*angles))
        masks = read_positions < choices.length[:, None], (back >= -choices.tokens[..., None]).flatten(0, 1)
        k, v, own_k, own_v = (part[:, 0] for part in (*shared, *separate))  # one group of heads
        context = _attend(q, (k, v), (own_k, own_v), masks).flatten(1)
        outcome = self.layer(self.attention.with_context(h[:, 0], context) + self.of_named(choices.named.flatten()))
        logits = self.score(outcome).unflatten(0, (-1, count))[..., 0] + choices.predicted @ self.of_predicted
        return logits.masked_fill(~choices.real, LEAST)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        config = self._config
        return rotary_angles(positions, config.head_dim, config.rope_theta, config.rope_frequencies)


def _attend(
    q: Tensor, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor]
) -> Tensor:
    """Attend from the actions of each state to what they share and to what is their own, under one softmax.

    Shared keys are not copied for each action. q: (B N, H, E). shared: keys and values (B, L, E). own: (B N, M, E).
    masks: of both, (B, L), (B N, M). Returns (B N, H, E).
    """
    (rows, heads, width), (k, v), (own_k, own_v) = q.shape, shared, own
    scores = (q.reshape(len(k), -1, width) @ k.mT).masked_fill(~masks[0][:, None], LEAST).reshape(rows, heads, -1)
    own_scores = (q @ own_k.mT).masked_fill(~masks[1][:, None], LEAST)
    weights = (torch.cat([scores, own_scores], -1) * width**-0.5).softmax(-1)
    to_shared, to_own = weights.split([k.shape[1], own_k.shape[1]], -1)
    return (to_shared.reshape(len(k), -1, k.shape[1]) @ v).reshape(q.shape) + to_own @ own_v


def _h_and_state(both: Tensor) -> tuple[Tensor, Tensor]:
    state, h = both.chunk(2, -1)
    return h, state


class PolicyAgent:
    """Agent of one play: takes the action with the highest score, and stops at the limit of the context."""

    identity: Mapping[str, str | int] = {}

    def __init__(self, model: WorldModel, policy: LatentPolicy) -> None:
        self._model, self._policy = model, policy
        self._reading: Reading | None = None

    @torch.inference_mode()
    def act(self, context: Context) -> str | None:
        try:
            self._read(context)
        except ContextTooLongError:
            return None
        assert self._reading is not None
        actions = actions_in_reach(context)
        _, choice = self._reading.look(actions)
        return actions[int(self._policy(Choices.of([choice]))[0].argmax())]

    def _read(self, context: Context) -> None:
        if self._reading is None:
            self._reading = Reading(self._model, context)
        for step in context.history[len(self._reading.context.history) :]:
            self._reading.observe(step.action, step.observation)
