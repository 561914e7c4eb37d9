"""Training rows: a teacher-forced trunk with deferred branches, all in one masked pass.

The trunk is a context as `format` renders it, and each of its steps one served prediction at horizon 1. A branch leaves
it after some step: action and state slots for each horizon k. The observation of horizon k hangs off the branch's spine
in a side branch of its own, so that no later action sees it, and so do the slots of h_0. Branches read the trunk's keys
and values up to where they left, and nothing of each other.

    trunk    <|goal|>g .. <|obs|>o0<|end|> <|act|>a1<|state|> <|obs|>o1<|end|> <|act|>a2<|state|> <|obs|>o2<|end|> ..
    branch        at step 1: <|act|>a2<|state|> <|act|>a3<|state|> ..
    h_0           <|state|>
    decode                              <|obs|>o2<|end|>    <|obs|>o3<|end|>

Where the template has no slots in the trunk (`StateSlots`), those of h_0 open the spine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from loopwm.core.block import for_queries, training_attention
from loopwm.text.format import RowRegime, StateSlots

Tokens = NDArray[np.integer]

IGNORED = -100
"""Label of a position without a target."""

TRUNK_HORIZON = 0

START = -1
"""`TreeRow.decode` of the slots of h_0 where they hang off the spine."""


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
class TokenEpisode:
    """A tokenised episode of n steps. Index 0 of the lists is the reset, whose action is empty.

    hidden_states: None for all steps where none is known. rewards: score differences in points, dones: whether the
    world ended there; both None where nobody recorded them.
    """

    goal: Tokens
    observations: Sequence[Tokens]
    actions: Sequence[Tokens]
    looks: Sequence[Tokens | None]
    inventories: Sequence[Tokens | None]
    rewards: Sequence[float] | None = None
    dones: Sequence[bool] | None = None
    hidden_states: Sequence[Tokens | None] | None = None
    env: str = ""
    policy: str = ""

    def head(self, step: int, regime: RowRegime) -> dict[str, Tokens | None]:
        """The texts that open a context at `step` before its observation, by the name of their mark."""
        texts: dict[str, Tokens | None] = {"goal": self.goal}
        if regime in ("briefed", "full"):
            texts["hidden"] = None if self.hidden_states is None else self.hidden_states[step]
        if regime in ("snapshot", "full"):
            texts |= {"look": self.looks[step], "inv": self.inventories[step]}
        return texts

    @property
    def last_step(self) -> int:
        return len(self.observations) - 1


@dataclass(frozen=True)
class Branch:
    """Deferred actions: the step they leave after, the horizons k that are decoded, in order. The deepest one is K."""

    step: int
    decoded: tuple[int, ...]

    @property
    def deepest(self) -> int:
        return self.decoded[-1]

    def cut(self, horizon: int) -> Branch:
        return replace(self, decoded=tuple(sorted({min(k, horizon) for k in self.decoded})))


@dataclass(frozen=True)
class RowPlan:
    """What of an episode a row shows.

    head: step whose observation opens the context, after what the regime shows of that step.
    first, last: the steps after the head that follow in the trunk (first > last: none).
    targets_from: first of these whose observation is a target, None for none.
    """

    head: int
    regime: RowRegime
    first: int
    last: int
    branches: tuple[Branch, ...]
    targets_from: int | None

    def cut(self, horizon: int) -> RowPlan:
        """The plan with no branch deeper than `horizon`: itself where none is."""
        if all(branch.deepest <= horizon for branch in self.branches):
            return self
        return replace(self, branches=tuple(branch.cut(horizon) for branch in self.branches))


@dataclass(frozen=True)
class BranchStep:
    """A latent h_k of a branch: the places of its slots in the row, and what the environment did there.

    deepest: K of its branch. supervised: its observation is decoded in the row. observation: o_k with its marks,
    empty at horizon 0. reward: points, NaN where not recorded.
    """

    places: range
    horizon: int
    deepest: int
    supervised: bool
    observation: Sequence[int]
    reward: float
    done: bool


@dataclass
class TreeRow:
    """One row of a batch: parallel lists over its tokens, the latents of its branches in order, and those of the steps
    of its trunk that are targets.

    limit: trunk tokens a position may see; branch: 0 trunk, else its number; decode: 0 spine, else the horizon
    decoded there, or START; stage: the horizon a token belongs to, 0 for the trunk and the slots of h_0; label: the
    next token where it is a target; horizon: that target's horizon, 0 in the trunk.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    limit: list[int] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    horizon: list[int] = field(default_factory=list)
    steps: list[BranchStep] = field(default_factory=list)
    trunk_steps: list[BranchStep] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> int:
        return int(sum(label != IGNORED for label in self.label))

    def append(self, tokens: Sequence[int], position: int, limit: int, branch: int, decode: int, stage: int) -> int:
        """Adds tokens without targets at consecutive positions; returns the position after them."""
        n = len(tokens)
        self.tokens += tokens
        self.positions += range(position, position + n)
        self.limit += [limit] * n
        self.branch += [branch] * n
        self.decode += [decode] * n
        self.stage += [stage] * n
        self.label += [IGNORED] * n
        self.horizon += [TRUNK_HORIZON] * n
        return position + n

    def supervise_last(self, count: int, horizon: int) -> None:
        """Makes the last `count` tokens targets of the positions before them."""
        end = len(self.tokens)
        for i in range(end - count - 1, end - 1):
            self.label[i] = self.tokens[i + 1]
            self.horizon[i] = horizon


class RowBuilder:
    """Lays out rows of episodes by their plans."""

    def __init__(self, ids: TemplateIds, slots: StateSlots) -> None:
        self.ids = ids
        self.slots = slots
        self._state = [ids.state] * slots.count

    def build(self, episode: TokenEpisode, plan: RowPlan) -> TreeRow:
        row = TreeRow()
        ends = self._trunk(row, episode, plan)
        for number, branch in enumerate(plan.branches, start=1):
            self._branch(row, episode, ends[branch.step], number, branch)
        return row

    def head(self, episode: TokenEpisode, step: int, regime: RowRegime) -> list[int]:
        """Tokens up to the end of the first shown observation. Raises ValueError if what it shows is not recorded."""
        tokens: list[int] = []
        for mark, text in episode.head(step, regime).items():
            if text is None:
                raise ValueError(f"step {step} has no {mark}, which a row of regime {regime} shows")
            tokens += [getattr(self.ids, mark), *text]
        return tokens + self._observation(episode, step)

    def _observation(self, episode: TokenEpisode, step: int) -> list[int]:
        return [self.ids.obs, *episode.observations[step], self.ids.end]

    def _trunk(self, row: TreeRow, episode: TokenEpisode, plan: RowPlan) -> dict[int, int]:
        """Appends the trunk; returns the trunk length after each of its steps."""
        position = self._trunk_part(row, self.head(episode, plan.head, plan.regime), 0)
        ends = {plan.head: position}
        for step in range(plan.first, plan.last + 1):
            slots = self._state if self.slots.in_trunk else []
            position = self._trunk_part(row, [self.ids.act, *episode.actions[step], *slots], position)
            places = range(position - len(slots), position)
            observation = self._observation(episode, step)
            position = self._trunk_part(row, observation, position)
            if plan.targets_from is not None and step >= plan.targets_from:
                row.supervise_last(len(observation) - 1, TRUNK_HORIZON)
                if slots:
                    row.trunk_steps.append(self._latent(episode, step, places, 1, 1, True))
            ends[step] = position
        return ends

    def _trunk_part(self, row: TreeRow, tokens: list[int], position: int) -> int:
        end = row.append(tokens, position, 0, 0, 0, 0)
        row.limit[position:end] = range(position + 1, end + 1)
        return end

    def _branch(self, row: TreeRow, episode: TokenEpisode, end: int, number: int, branch: Branch) -> None:
        """Appends the slots of h_0, the spine of a branch from position `end` on, and its side branches."""
        position = row.append(self._state, end, end, number, START if self.slots.in_trunk else 0, 0)
        row.steps.append(BranchStep(self._slots_at_end(row), 0, branch.deepest, False, (), math.nan, False))
        position = end if self.slots.in_trunk else position
        for k in range(1, branch.deepest + 1):
            step = branch.step + k
            position = row.append([self.ids.act, *episode.actions[step], *self._state], position, end, number, 0, k)
            places = self._slots_at_end(row)
            row.steps.append(self._latent(episode, step, places, k, branch.deepest, k in branch.decoded))
            if k in branch.decoded:
                observation = self._observation(episode, step)
                row.append(observation, position, end, number, k, k)
                row.supervise_last(len(observation) - 1, k)

    def _latent(
        self, episode: TokenEpisode, step: int, places: range, horizon: int, deepest: int, supervised: bool
    ) -> BranchStep:
        observation = self._observation(episode, step)
        reward = math.nan if episode.rewards is None else episode.rewards[step]
        done = episode.dones is not None and episode.dones[step]
        return BranchStep(places, horizon, deepest, supervised, observation, reward, done)

    def _slots_at_end(self, row: TreeRow) -> range:
        return range(len(row) - self.slots.count, len(row))


Layout = Callable[[TreeRow], Sequence[int]]
"""The block of columns each token of a row goes to: 0 the trunk, in its row's order within a block."""


def trunk_and_branches(row: TreeRow) -> Sequence[int]:
    """The layout for one pass: the trunk, then everything else."""
    return [min(branch, 1) for branch in row.branch]


def by_stage(row: TreeRow) -> Sequence[int]:
    """The layout for stages: the trunk, the slots of h_0, then what belongs to horizon 1, 2, .."""
    return [0 if branch == 0 else stage + 1 for branch, stage in zip(row.branch, row.stage, strict=True)]


def row_widths(rows: Sequence[TreeRow], layout: Layout) -> NDArray[np.int64]:
    """Columns that each row has in each block, (rows, blocks): at least two blocks."""
    counts = [np.bincount(layout(row), minlength=2) for row in rows]
    blocks = max(map(len, counts))
    return np.array([np.pad(count, (0, blocks - len(count))) for count in counts])


@dataclass(frozen=True)
class BranchSteps:
    """The latents h_k of a batch's branches, N in all, branch by branch with k = 0, 1, .., K.

    row (N,) and columns (N, M): where the slots stand. branch (N,): numbered over the batch, `branches` in all.
    horizon, deepest, supervised, reward, done (N,): as in `BranchStep`. observation (N, O): o_k padded at the end,
    observation_length (N,).
    """

    row: Tensor
    columns: Tensor
    branch: Tensor
    horizon: Tensor
    deepest: Tensor
    supervised: Tensor
    reward: Tensor
    done: Tensor
    observation: Tensor
    observation_length: Tensor
    branches: int

    @classmethod
    def collate(
        cls, rows: Sequence[Sequence[BranchStep]], columns: Sequence[NDArray[np.int64]], slots: int, pad_id: int
    ) -> BranchSteps:
        """rows: the latents of each row. columns: for each row, the batch column of each of its tokens. slots: M."""
        steps = [(i, step) for i, row in enumerate(rows) for step in row]
        at = np.array([columns[i][step.places] for i, step in steps], dtype=np.int64)
        horizon = torch.tensor([step.horizon for _, step in steps], dtype=torch.long)
        lengths = [len(step.observation) for _, step in steps]
        observation = np.full((len(steps), max(lengths, default=0)), pad_id, dtype=np.int64)
        for line, (_, step) in zip(observation, steps, strict=True):
            line[: len(step.observation)] = step.observation
        return cls(
            row=torch.tensor([i for i, _ in steps], dtype=torch.long),
            columns=torch.from_numpy(at.reshape(len(steps), slots)),
            branch=(horizon == 0).long().cumsum(0) - 1,
            horizon=horizon,
            deepest=torch.tensor([step.deepest for _, step in steps], dtype=torch.long),
            supervised=torch.tensor([step.supervised for _, step in steps], dtype=torch.bool),
            reward=torch.tensor([step.reward for _, step in steps], dtype=torch.float32),
            done=torch.tensor([step.done for _, step in steps], dtype=torch.bool),
            observation=torch.from_numpy(observation),
            observation_length=torch.tensor(lengths, dtype=torch.long),
            branches=int((horizon == 0).sum()),
        )

    @property
    def between(self) -> Tensor:
        """The steps k = 1, .., K - 1, which nobody decodes in a deferred rollout: bool (N,)."""
        return (self.horizon > 0) & (self.horizon < self.deepest)

    def at_slots(self, h_BLD: Tensor) -> Tensor:
        """What a tensor (B, L, D) holds at the slots: (N, M, D)."""
        return h_BLD[self.row[:, None], self.columns]

    def to(self, device: torch.device) -> BranchSteps:
        return replace(self, **_moved(self, device))


@dataclass(frozen=True)
class TreeMask:
    """Who sees whom in a batch whose first `trunk` columns are trunks: there attention is plainly causal.

    branches: (B, 1, L - trunk, L) bool, True where a branch position may look.
    """

    trunk: int
    branches: Tensor

    def __getitem__(self, rows: Tensor) -> TreeMask:
        return TreeMask(self.trunk, self.branches[rows])

    def stage(self, start: int, end: int) -> TreeMask:
        """What columns start .. end may see of all columns before `end`. `start` is 0 or at least the trunk's end."""
        skipped = max(0, start - self.trunk)
        return TreeMask(0 if start else self.trunk, self.branches[:, :, skipped : end - self.trunk, :end])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention (B, H, L, E) of new queries, whose keys are the last of k; k, v: (B, G, S, E)."""
        k, v = for_queries(k, q.shape[1]), for_queries(v, q.shape[1])
        t, parts = self.trunk, []
        if t:
            parts.append(F.scaled_dot_product_attention(q[:, :, :t], k[:, :, :t], v[:, :, :t], is_causal=True))
        if t < q.shape[2]:
            parts.append(F.scaled_dot_product_attention(q[:, :, t:], k, v, attn_mask=self.branches))
        return torch.cat(parts, dim=2)


@dataclass(frozen=True)
class BranchSpan:
    """Columns start .. end of a branch, counted from the trunk's end, and what they see: trunk columns before `limit`
    and, of the branch itself, what `visible` (end - start, limit + end - start) says, bool over both."""

    start: int
    end: int
    limit: int
    visible: Tensor


@dataclass(frozen=True)
class BranchMask:
    """A `TreeMask` taken apart: every branch by itself looks at its trunk and at itself, and at nothing else.

    rows: the branches of each row in the order of their columns, without gaps. Padding sees nothing and gets zeros.
    """

    trunk: int
    rows: tuple[tuple[BranchSpan, ...], ...]

    def __getitem__(self, rows: Tensor) -> BranchMask:
        return BranchMask(self.trunk, tuple(self.rows[i] for i in rows.tolist()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention (B, H, L, E); k, v: (B, G, L, E)."""
        sizes = [self.trunk, q.shape[2] - self.trunk]
        # Every tensor is cut up once: each slice by itself would send back a gradient of the whole tensor's size.
        (trunk_q, branch_q), (trunk_k, branch_k), (trunk_v, branch_v) = (x.split(sizes, dim=2) for x in (q, k, v))
        trunk = training_attention(trunk_q, trunk_k, trunk_v)
        parts = (trunk_k, trunk_v, branch_q, branch_k, branch_v)
        rows = [_attend_branches(spans, *row) for spans, *row in zip(self.rows, *map(torch.unbind, parts), strict=True)]
        return torch.cat((trunk, torch.stack(rows)), dim=2)


def _attend_branches(
    spans: Sequence[BranchSpan], trunk_k: Tensor, trunk_v: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention of a row's branch columns (H, L, E), one call a branch; their k, v (G, L, E), the trunk's (G, P, E)."""
    padding = q.shape[1] - (spans[-1].end if spans else 0)
    sizes = [span.end - span.start for span in spans] + [padding]
    limits = sorted({span.limit for span in spans})
    pieces = [b - a for a, b in itertools.pairwise((0, *limits, trunk_k.shape[1]))]
    own = zip(spans, *(x.split(sizes, dim=1) for x in (q, k, v)), strict=False)
    seen = [x.split(pieces, dim=1) for x in (trunk_k, trunk_v)]
    outs = []
    for span, q_HLE, *own_kv in own:
        count = limits.index(span.limit) + 1
        keys, values = (torch.cat((*trunk[:count], x), dim=1) for trunk, x in zip(seen, own_kv, strict=True))
        outs.append(training_attention(q_HLE[None], keys[None], values[None], span.visible)[0])
    return torch.cat((*outs, q.new_zeros(q.shape[0], padding, q.shape[2])), dim=1)


def tree_attention(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: TreeMask | BranchMask) -> Tensor:
    """An `Attend` for training rows: no cache, every slot alike. Trunk queries never pay for the branches."""
    return mask.attend(q, k, v).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class TreeBatch:
    """Rows padded to one length L: every tensor (B, L). The first `trunk` columns hold the trunks, the others the
    branches, as the layout says; every block is padded at its end. Padding has branch -1 and no targets. `place` is
    the index of a token in its row.

    stage_ends: where the stages end that run one after another where a latent is carried; with the layout for one
    pass there is one. steps: the latents of the branches. trunk_steps: those of the trunk's steps that are targets;
    branches count for nothing there. `row_ids` are the rows' indices in the global batch.
    """

    tokens: Tensor
    positions: Tensor
    limit: Tensor
    branch: Tensor
    decode: Tensor
    stage: Tensor
    label: Tensor
    horizon: Tensor
    place: Tensor
    steps: BranchSteps
    trunk_steps: BranchSteps
    trunk: int
    stage_ends: tuple[int, ...]
    row_ids: tuple[int, ...]

    @classmethod
    def collate(
        cls,
        rows: Sequence[TreeRow],
        row_ids: Sequence[int],
        pad_id: int,
        layout: Layout = trunk_and_branches,
    ) -> TreeBatch:
        widths = row_widths(rows, layout).max(0)
        ends = widths.cumsum()
        columns = [_columns(np.asarray(layout(row)), ends - widths) for row in rows]

        slots = max((len(s.places) for row in rows for s in (*row.steps, *row.trunk_steps)), default=0)

        def padded(values: Sequence[Sequence[int]], fill: int) -> Tensor:
            out = np.full((len(rows), ends[-1]), fill, dtype=np.int64)
            for line, places, row in zip(out, columns, values, strict=True):
                line[places] = row
            return torch.from_numpy(out)

        return cls(
            tokens=padded([row.tokens for row in rows], pad_id),
            positions=padded([row.positions for row in rows], 0),
            limit=padded([row.limit for row in rows], 0),
            branch=padded([row.branch for row in rows], -1),
            decode=padded([row.decode for row in rows], 0),
            stage=padded([row.stage for row in rows], 0),
            label=padded([row.label for row in rows], IGNORED),
            horizon=padded([row.horizon for row in rows], TRUNK_HORIZON),
            place=padded([range(len(row)) for row in rows], 0),
            steps=BranchSteps.collate([row.steps for row in rows], columns, slots, pad_id),
            trunk_steps=BranchSteps.collate([row.trunk_steps for row in rows], columns, slots, pad_id),
            trunk=int(ends[0]),
            stage_ends=tuple(ends[1:].tolist()),
            row_ids=tuple(row_ids),
        )

    def to(self, device: torch.device) -> TreeBatch:
        steps, trunk_steps = self.steps.to(device), self.trunk_steps.to(device)
        return replace(self, steps=steps, trunk_steps=trunk_steps, **_moved(self, device))

    @property
    def targets(self) -> int:
        return int((self.label != IGNORED).sum())

    def attention_mask(self) -> TreeMask:
        """A branch position sees its row's trunk up to its limit, its branch's spine, and its own side branch."""
        t, length = self.trunk, self.tokens.shape[1]
        index = torch.arange(length, device=self.tokens.device)
        in_trunk = index[None, None, :] < self.limit[:, t:, None]
        causal = index[None, :] <= index[t:, None]
        same_branch = self.branch[:, t:, None] == self.branch[:, None, :]
        decode_k = self.decode[:, None, :]
        spine_or_own = (decode_k == 0) | (decode_k == self.decode[:, t:, None])
        own = same_branch & spine_or_own & causal & (index >= t)
        return TreeMask(t, (in_trunk | own)[:, None])

    def state_mask(self) -> TreeMask:
        """As `attention_mask`, but what is decoded sees the newest slots and itself only: the paper's D(h_K)."""
        t = self.trunk
        slots = torch.zeros_like(self.tokens, dtype=torch.bool)
        slots[self.steps.row[:, None], self.steps.columns] = True
        newest = slots[:, None, :] & (self.stage[:, None, :] == self.stage[:, t:, None])
        decode = self.decode[:, t:, None]
        allowed = (decode <= 0) | newest | (decode == self.decode[:, None, :])
        return TreeMask(t, self.attention_mask().branches & allowed[:, None])


def branch_mask(batch: TreeBatch, mask: TreeMask) -> BranchMask:
    """The mask of a batch laid out for one pass, taken apart by branches."""
    t = batch.trunk
    rows = []
    for row, branch in enumerate(batch.branch[:, t:].tolist()):
        spans, start = [], 0
        for number, columns in itertools.groupby(branch):
            end = start + len(list(columns))
            if number > 0:
                limit = int(batch.limit[row, t + start])
                seen = mask.branches[row, 0, start:end]
                visible = torch.cat((seen[:, :limit], seen[:, t + start : t + end]), dim=1)
                spans.append(BranchSpan(start, end, limit, visible))
            start = end
        rows.append(tuple(spans))
    return BranchMask(t, tuple(rows))


def _columns(blocks: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The column of each token, given its block and where the blocks start."""
    order = blocks.argsort(kind="stable")
    rank = np.empty(len(blocks), dtype=np.int64)
    rank[order] = np.arange(len(blocks))
    before = np.bincount(blocks, minlength=len(starts)).cumsum() - np.bincount(blocks, minlength=len(starts))
    return starts[blocks] + rank - before[blocks]


def _moved(tensors: Any, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in vars(tensors).items() if isinstance(value, Tensor)}
