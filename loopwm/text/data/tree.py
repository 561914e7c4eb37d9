"""Training rows: a teacher-forced trunk with deferred branches, all in one masked pass.

The trunk is a context as `loopwm.records.template` renders it, and each of its steps is one served prediction at
horizon 1. A branch leaves it after a step: action and state slots for each horizon k. The observation of horizon k is a
side branch of its own off the branch's spine, so that no later action attends to it, and so are the slots of h_0.
Branches attend to the trunk up to the step they leave after, and never to each other.

    trunk    <|goal|>g .. <|obs|>o0<|end|> <|act|>a1<|state|> <|obs|>o1<|end|> <|act|>a2<|state|> <|obs|>o2<|end|> ..
    branch        at step 1: <|act|>a2<|state|> <|act|>a3<|state|> ..
    h_0           <|state|>
    decode                              <|obs|>o2<|end|>    <|obs|>o3<|end|>

If the template has no slots in the trunk (`StateSlots`), those of h_0 open the spine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from loopwm.records.template import ContextKind, StateSlots
from loopwm.records.token_episode import ANSWER, INVENTORY, LOOK, OBSERVATION, TokenEpisode
from loopwm.text.answerable import RowFacts

IGNORED = -100
"""Label of a position without a target."""

TRUNK_HORIZON = 0

QUERY_HORIZON = 17
"""`TreeRow.horizon` of the answers to state queries, above every horizon of a branch: they are reported apart."""

START = -1
"""`TreeRow.decode` of the slots of h_0 in a side branch."""


@dataclass(frozen=True)
class TemplateIds:
    """Token ids of the template's marks."""

    goal: int
    hidden: int
    look: int
    inv: int
    obs: int
    act: int
    state: int
    end: int


@dataclass(frozen=True)
class Branch:
    """Deferred actions: the step they follow, and the horizons k that are decoded, ascending. The deepest is K.

    query: index of a state query that replaces the last action, after step `step` + K - 1; None for none.
    """

    step: int
    decoded: tuple[int, ...]
    query: int | None = None

    @property
    def deepest(self) -> int:
        return self.decoded[-1]

    def cut(self, horizon: int) -> Branch:
        return replace(self, decoded=tuple(sorted({min(k, horizon) for k in self.decoded})))  # a set: cuts may coincide


@dataclass(frozen=True)
class RowPlan:
    """Part of an episode in a row.

    head: step whose observation opens the context, after the other texts of the context kind.
    first, last: steps after the head in the trunk (first > last: none).
    targets_from: first of these whose observation is a target, None for none.
    """

    head: int
    context_kind: ContextKind
    first: int
    last: int
    branches: tuple[Branch, ...]
    targets_from: int | None

    def cut(self, horizon: int) -> RowPlan:
        """Cut branches to `horizon` and drop deeper state queries; return the plan itself if nothing is deeper."""
        if all(branch.deepest <= horizon for branch in self.branches):
            return self
        branches = (branch for branch in self.branches if branch.query is None or branch.deepest <= horizon)
        return replace(self, branches=tuple(branch.cut(horizon) for branch in branches))


@dataclass(frozen=True)
class Words:
    """A text as the words that a latent is to name, with their weights in the loss."""

    tokens: Sequence[int] = ()
    weights: Sequence[float] = ()


NO_OUTCOME = (math.nan, False, True)
"""Reward, end and acceptance of h_0 and of queries, which are answered, but pay nothing that is known."""

STATE_KINDS, STATE_NAMES = (LOOK, INVENTORY), ("look", "inventory")
"""Texts of the state after a step."""


@dataclass(frozen=True)
class BranchStep:
    """A latent h_k of a branch: places of its slots in the row, and the outcome of the step.

    deepest: K of its branch. supervised: its observation is decoded in the row. words: o_k with its marks, which weigh
    nothing; empty at horizon 0. reward: points, NaN if not recorded. accepted: not refused. state: the state's texts,
    one for each of `STATE_KINDS`; none if they are no targets.
    """

    places: range
    horizon: int
    deepest: int
    supervised: bool
    words: Words
    reward: float
    done: bool
    accepted: bool
    state: tuple[Words, ...] = ()

    def moved(self, offset: int) -> BranchStep:
        """Return the step with places `offset` tokens further on."""
        return replace(self, places=range(self.places.start + offset, self.places.stop + offset))


@dataclass
class TreeRow:
    """One row of a batch: parallel lists over its tokens, the latents of its branches, and those of target trunk steps.

    limit: trunk tokens that a position attends to; branch: 0 trunk, else its number; decode: 0 spine, else the horizon
    decoded there, or START; stage: horizon that a token belongs to, 0 for the trunk and the slots of h_0; label: the
    next token if it is a target; horizon: that target's horizon, 0 in the trunk; undetermined: True if no text of the
    row determines that target; weight: of that target in the loss; start: where the token's own row starts, if this
    line holds several (`loopwm/text/data/collate.py:join`).
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    limit: list[int] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    horizon: list[int] = field(default_factory=list)
    undetermined: list[bool] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    steps: list[BranchStep] = field(default_factory=list)
    trunk_steps: list[BranchStep] = field(default_factory=list)
    start: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> int:
        return int(sum(label != IGNORED for label in self.label))

    def append(self, tokens: Sequence[int], position: int, limit: int, branch: int, decode: int, stage: int) -> int:
        """Append tokens without targets at consecutive positions; return the position after them."""
        n = len(tokens)
        self.tokens += tokens
        self.positions += range(position, position + n)
        self.limit += [limit] * n
        self.branch += [branch] * n
        self.decode += [decode] * n
        self.stage += [stage] * n
        self.label += [IGNORED] * n
        self.horizon += [TRUNK_HORIZON] * n
        self.undetermined += [False] * n
        self.start += [0] * n
        return position + n

    def supervise_last(self, undetermined: Sequence[bool], horizon: int) -> None:
        """Make the last tokens targets of the positions before them. undetermined: one a target."""
        end = len(self.tokens)
        # Labels are shifted by one: position i predicts token i + 1.
        for i, unknown in enumerate(undetermined, start=end - len(undetermined) - 1):
            self.label[i] = self.tokens[i + 1]
            self.horizon[i] = horizon
            self.undetermined[i] = unknown


@dataclass(frozen=True)
class TargetWeights:
    """Weights of targets in the loss.

    By token id, times `opening` for the first of an observation, times `undetermined`.
    """

    tokens: Mapping[int, float] = field(default_factory=dict)
    opening: float = 1.0
    undetermined: float = 1.0

    def of(self, labels: Sequence[int], undetermined: Sequence[bool]) -> list[float]:
        """Return one weight a position, 1 without a target. Targets of one observation are adjacent."""
        weights = [
            self.tokens.get(label, 1.0) * (self.undetermined if unknown else 1.0)
            for label, unknown in zip(labels, undetermined, strict=True)
        ]
        for i, label in enumerate(labels):
            if label != IGNORED and (i == 0 or labels[i - 1] == IGNORED):
                weights[i] *= self.opening
        return weights


class RowBuilder:
    """Build rows of episodes by their plans.

    weights: of targets in the loss, by world; 1 for worlds that are not named. change_weight: of words of the state
    that the step before did not show, relative to the others; 0: latents get no words of the state.
    """

    def __init__(
        self,
        ids: TemplateIds,
        slots: StateSlots,
        weights: Mapping[str, TargetWeights] = MappingProxyType({}),
        change_weight: float = 0.0,
    ) -> None:
        self.change_weight = change_weight
        self.ids = ids
        self.slots = slots
        self.weights = weights
        self._state = [ids.state] * slots.count

    def build(self, episode: TokenEpisode, plan: RowPlan) -> TreeRow:
        row = TreeRow()
        # Branches may act beyond the trunk, and their actions name things.
        deferred = max((branch.step + branch.deepest for branch in plan.branches), default=plan.last)
        facts = RowFacts(episode, plan.head, plan.context_kind, range(plan.first, max(plan.last, deferred) + 1))
        ends = self._trunk(row, episode, plan, facts)
        for number, branch in enumerate(plan.branches, start=1):
            self._branch(row, episode, ends[branch.step], number, branch, facts)
        row.weight = self._weights(episode).of(row.label, row.undetermined)
        return row

    def _weights(self, episode: TokenEpisode) -> TargetWeights:
        return self.weights.get(episode.env, TargetWeights())

    def head(self, episode: TokenEpisode, step: int, context_kind: ContextKind) -> list[int]:
        """Return the tokens up to the end of the first observation. Raises ValueError if a text was not recorded."""
        tokens: list[int] = []
        for mark, text in episode.head(step, context_kind).items():
            if text is None:
                raise ValueError(f"step {step}: must have {mark} for a row of context {context_kind}, got none")
            tokens += [getattr(self.ids, mark), *text]
        return tokens + self._observation(episode, step)

    def _observation(self, episode: TokenEpisode, step: int) -> list[int]:
        return [self.ids.obs, *episode.observations[step], self.ids.end]

    def _trunk(self, row: TreeRow, episode: TokenEpisode, plan: RowPlan, facts: RowFacts) -> dict[int, int]:
        """Append the trunk; return the trunk length after each of its steps."""
        position = self._trunk_part(row, self.head(episode, plan.head, plan.context_kind), 0)
        ends = {plan.head: position}
        for step in range(plan.first, plan.last + 1):
            slots = self._state if self.slots.in_trunk else []
            position = self._trunk_part(row, [self.ids.act, *episode.actions[step], *slots], position)
            places = range(position - len(slots), position)
            observation = self._observation(episode, step)
            position = self._trunk_part(row, observation, position)
            if plan.targets_from is not None and step >= plan.targets_from:
                undetermined = [*facts.undetermined(OBSERVATION, step, last_shown=step - 1), False]  # <|end|>: known
                row.supervise_last(undetermined, TRUNK_HORIZON)
                if slots:
                    state = self._state_words(episode, step, facts, step - 1)
                    words = self._observed(episode, observation, undetermined)
                    # As a branch of one action.
                    row.trunk_steps.append(BranchStep(places, 1, 1, True, words, *self._outcome(episode, step), state))
            ends[step] = position
        return ends

    def _trunk_part(self, row: TreeRow, tokens: list[int], position: int) -> int:
        end = row.append(tokens, position, 0, 0, 0, 0)
        # Causal in the trunk: token i sees the i + 1 tokens up to itself.
        row.limit[position:end] = range(position + 1, end + 1)
        return end

    def _branch(
        self, row: TreeRow, episode: TokenEpisode, end: int, number: int, branch: Branch, facts: RowFacts
    ) -> None:
        """Append the slots of h_0, the spine of a branch from position `end` on, and its side branches."""
        # h_0 is a side branch if the trunk has slots: no later token attends to it there, as in serving.
        position = row.append(self._state, end, end, number, START if self.slots.in_trunk else 0, 0)
        state = self._state_words(episode, branch.step, facts, branch.step)
        row.steps.append(BranchStep(self._slots_at_end(row), 0, branch.deepest, False, Words(), *NO_OUTCOME, state))
        position = end if self.slots.in_trunk else position
        for k in range(1, branch.deepest + 1):
            step, is_query = branch.step + k, branch.query is not None and k == branch.deepest
            if is_query:
                action, text = episode.queries_at(step - 1)[branch.query or 0]
            else:
                action, text = episode.actions[step], episode.observations[step]
            position = row.append([self.ids.act, *action, *self._state], position, end, number, 0, k)
            observation = [self.ids.obs, *text, self.ids.end]
            outcome = NO_OUTCOME if is_query else self._outcome(episode, step)
            decoded = k in branch.decoded
            # A query leaves the state as it is: its answer is a text of the step before.
            place = (ANSWER, step - 1, branch.query or 0) if is_query else (OBSERVATION, step, 0)
            undetermined = [*facts.undetermined(*place, last_shown=branch.step), False]
            words = self._observed(episode, observation, undetermined)
            places = self._slots_at_end(row)
            state = self._state_words(episode, place[1], facts, branch.step)
            row.steps.append(BranchStep(places, k, branch.deepest, decoded, words, *outcome, state))
            if decoded:
                # `position` is not advanced: the next action continues the spine as if nothing were decoded.
                row.append(observation, position, end, number, k, k)
                row.supervise_last(undetermined, QUERY_HORIZON if is_query else k)

    def _state_words(self, episode: TokenEpisode, step: int, facts: RowFacts, last_shown: int) -> tuple[Words, ...]:
        """Return the words of the state after a step, for a reader who sees observations up to `last_shown`."""
        if not self.change_weight:
            return ()
        return tuple(self._words(episode, kind, step, facts, last_shown) for kind in STATE_KINDS)

    def _words(self, episode: TokenEpisode, kind: int, step: int, facts: RowFacts, last_shown: int) -> Words:
        words = _changed_words(episode, kind, step, self.change_weight)
        hidden = facts.undetermined(kind, step, last_shown=last_shown)
        if not any(hidden):
            return words
        unknown = self._weights(episode).undetermined
        weights = [weight * (unknown if h else 1.0) for weight, h in zip(words.weights, hidden, strict=True)]
        return Words(words.tokens, weights)

    def _observed(self, episode: TokenEpisode, observation: Sequence[int], undetermined: Sequence[bool]) -> Words:
        """Return an observation as words; its marks, the first and the last token, say nothing of what happened."""
        weights = self._weights(episode).of(observation[1:-1], undetermined[:-1])
        return Words(observation, [0.0, *weights, 0.0])

    @staticmethod
    def _outcome(episode: TokenEpisode, step: int) -> tuple[float, bool, bool]:
        """Return the reward of a step, NaN if not recorded, if the episode ends there, and if it is accepted."""
        return float(episode.rewards[step]), bool(episode.dones[step]), bool(episode.accepted[step])

    def _slots_at_end(self, row: TreeRow) -> range:
        return range(len(row) - self.slots.count, len(row))


@lru_cache(maxsize=1024)
def _changed_words(episode: TokenEpisode, kind: int, step: int, change_weight: float) -> Words:
    """Return the words of a text of the state; those that the step before did not show weigh `change_weight`."""
    text = episode.text(kind, step)
    if text is None:
        return Words()
    before = episode.text(kind, step - 1) if step else text
    old = set(() if before is None else before.tolist())
    tokens = text.tolist()
    return Words(tokens, [1.0 if token in old else change_weight for token in tokens])


Layout = Callable[[TreeRow], Sequence[int]]
"""Function from a row to the block of columns of each token; 0 is the trunk. Blocks keep the row's order."""


def trunk_and_branches(row: TreeRow) -> Sequence[int]:
    """Lay out for one pass: the trunk, then everything else."""
    return [min(branch, 1) for branch in row.branch]


def by_stage(row: TreeRow) -> Sequence[int]:
    """Lay out for stages: the trunk, the slots of h_0, then the tokens of horizon 1, 2, .."""
    return [0 if branch == 0 else stage + 1 for branch, stage in zip(row.branch, row.stage, strict=True)]
