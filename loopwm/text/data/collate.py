"""Collate training rows to batches of tensors, with masks and the latents of their branches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopwm.text.data.tree import IGNORED, TRUNK_HORIZON, BranchStep, Layout, TreeRow, Words, trunk_and_branches
from loopwm.text.data.tree_attention import KEYS_MULTIPLE, BranchMask, BranchSpan, PackedMask, TreeMask

WIDTH_MULTIPLE = 64
"""Blocks of columns are padded to a multiple of this, so that few shapes occur: oneDNN compiles a kernel for every new
shape of a product, which took up to a third of the time of the products themselves.
"""


@dataclass(frozen=True)
class TreeBatch:
    """Rows padded to one length L: every tensor (B, L).

    The first `trunk` columns hold the trunks, the others the branches, as the layout says; every block is padded at its
    end.
    Padding has branch -1 and no targets.

    place: index of a token in its row. start: as in `TreeRow`. stage_ends: end columns of the stages that run one after
    another if a latent is carried; one with the layout for one pass. steps: latents of the branches. trunk_steps:
    latents of trunk steps that are targets, with branch numbers that mean nothing. row_ids: indices of the rows in the
    global batch.
    """

    tokens: Tensor
    positions: Tensor
    limit: Tensor
    branch: Tensor
    decode: Tensor
    stage: Tensor
    label: Tensor
    horizon: Tensor
    undetermined: Tensor
    weight: Tensor
    place: Tensor
    start: Tensor
    steps: BranchSteps
    trunk_steps: BranchSteps
    trunk: int
    stage_ends: tuple[int, ...]
    row_ids: tuple[int, ...]

    @classmethod
    def collate(
        cls, rows: Sequence[TreeRow], row_ids: Sequence[int], pad_id: int, layout: Layout = trunk_and_branches
    ) -> TreeBatch:
        return cls._collate(rows, row_ids, pad_id, layout, row_widths(rows, layout).max(0))  # the widest row's

    @classmethod
    def _collate(
        cls, rows: Sequence[TreeRow], row_ids: Sequence[int], pad_id: int, layout: Layout, widths: NDArray[np.int64]
    ) -> Self:
        ends = widths.cumsum()
        columns = [_columns(np.asarray(layout(row), dtype=np.int64), ends - widths) for row in rows]

        slots = max((len(s.places) for row in rows for s in (*row.steps, *row.trunk_steps)), default=0)  # M

        def padded(values: Sequence[Sequence[float]], fill: float) -> Tensor:
            out = np.full((len(rows), ends[-1]), fill, dtype=np.float32 if isinstance(fill, float) else np.int64)
            for line, places, row in zip(out, columns, values, strict=True):
                line[places] = row
            return torch.from_numpy(out)

        fills = dict.fromkeys(("positions", "limit", "decode", "stage", "start"), 0)
        fills |= {"tokens": pad_id, "label": IGNORED, "horizon": TRUNK_HORIZON}
        fills |= {"branch": -1}  # no real branch: nothing attends to padding
        return cls(
            **{name: padded([getattr(row, name) for row in rows], fill) for name, fill in fills.items()},
            undetermined=padded([row.undetermined for row in rows], 0).bool(),
            weight=padded([row.weight for row in rows], 1.0),  # the only float: `padded` goes by its type
            place=padded([range(len(row)) for row in rows], 0),  # noise is drawn by it
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
        """Let a branch position attend to its row's trunk up to its limit, its spine, and its own side branch."""
        t, length = self.trunk, self.tokens.shape[1]
        index = torch.arange(length, device=self.tokens.device)
        # limit counts the trunk tokens up to the step that the branch leaves after.
        in_trunk = index[None, None, :] < self.limit[:, t:, None]
        causal = index[None, :] <= index[t:, None]  # columns keep the order of a row's tokens
        same_branch = self.branch[:, t:, None] == self.branch[:, None, :]
        decode_k = self.decode[:, None, :]
        # Side branches of other horizons stay hidden: a served decode never sees them either.
        spine_or_own = (decode_k == 0) | (decode_k == self.decode[:, t:, None])
        own = same_branch & spine_or_own & causal & (index >= t)
        return TreeMask(t, (in_trunk | own)[:, None])

    def state_mask(self) -> TreeMask:
        """Mask as `attention_mask`, but decoded tokens attend to the newest slots and themselves only.

        Source: D(h_K) (LoopWM, equation 18).
        """
        t = self.trunk
        slots = torch.zeros_like(self.tokens, dtype=torch.bool)
        slots[self.steps.row[:, None], self.steps.columns] = True
        # Slots of one's own stage are those of h_k; earlier stages hold h_0 .. h_{k-1}.
        newest = slots[:, None, :] & (self.stage[:, None, :] == self.stage[:, t:, None])
        decode = self.decode[:, t:, None]
        allowed = (decode <= 0) | newest | (decode == self.decode[:, None, :])  # spine and slots of h_0: as before
        return TreeMask(t, self.attention_mask().branches & allowed[:, None])


@dataclass(frozen=True)
class PackedBatch(TreeBatch):
    """Lines of several rows each, without blocks: one fixed shape and little padding, as GPUs need it."""

    @classmethod
    def of_lines(cls, rows: Sequence[TreeRow], row_ids: Sequence[int], pad_id: int, columns: int) -> PackedBatch:
        """Collate lines made by `join` to `columns` columns, or to a multiple that holds the longest."""
        width = columns * max(1, math.ceil(max(map(len, rows)) / columns))
        return cls._collate(rows, row_ids, pad_id, lambda row: [0] * len(row), np.array([width, 0]))

    def packed_mask(self) -> PackedMask:
        return PackedMask.of(self.start, self.limit, self.branch, self.decode)


def join(rows: Sequence[TreeRow]) -> TreeRow:
    """Put rows one after another on a line. Limits and places count from its start, branches over all rows."""
    line = TreeRow()
    branches = 0
    for row in rows:
        offset = len(line)
        for name in ("tokens", "positions", "decode", "stage", "label", "horizon", "undetermined", "weight"):
            getattr(line, name).extend(getattr(row, name))
        line.start += [offset] * len(row)
        line.limit += [offset + limit for limit in row.limit]
        line.branch += [branch and branches + branch for branch in row.branch]
        line.steps += [step.moved(offset) for step in row.steps]
        line.trunk_steps += [step.moved(offset) for step in row.trunk_steps]
        branches += max(row.branch, default=0)
    return line


def branch_mask(batch: TreeBatch, mask: TreeMask) -> BranchMask:
    """Split the mask of a batch that is laid out for one pass by branches."""
    t = batch.trunk
    rows = []
    for row, branch in enumerate(batch.branch[:, t:].tolist()):
        spans, start = [], 0
        for number, columns in itertools.groupby(branch):
            end = start + len(list(columns))
            if number > 0:  # padding, -1, gets no span
                # Round up to the multiple; the mask still hides the surplus columns.
                limit = min(-(-int(batch.limit[row, t + start]) // KEYS_MULTIPLE) * KEYS_MULTIPLE, t)
                visible = mask.branches[row, 0, start:end]
                visible = torch.cat((visible[:, :limit], visible[:, t + start : t + end]), dim=1)
                spans.append(BranchSpan(start, end, limit, visible))
            start = end
        rows.append(tuple(spans))
    return BranchMask(t, tuple(rows))


def _columns(blocks: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the column of each token, given its block and the starts of the blocks."""
    # Stable: tokens keep their row's order within a block, on which causality relies.
    order = blocks.argsort(kind="stable")
    rank = np.empty(len(blocks), dtype=np.int64)
    rank[order] = np.arange(len(blocks))
    # Ranks count over all blocks: subtract the tokens of those before.
    before = np.bincount(blocks, minlength=len(starts)).cumsum() - np.bincount(blocks, minlength=len(starts))
    return starts[blocks] + rank - before[blocks]


def _moved(tensors: Any, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in vars(tensors).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class WordBags:
    """Texts of latents as bags of words: tokens (N, O) padded at the end, weight (N, O) in the loss, 0 for padding."""

    tokens: Tensor
    weight: Tensor

    @classmethod
    def collate(cls, texts: Sequence[Words], pad_id: int) -> WordBags:
        tokens = np.full((len(texts), max((len(text.tokens) for text in texts), default=0)), pad_id, dtype=np.int64)
        weight = np.zeros(tokens.shape, dtype=np.float32)
        for i, text in enumerate(texts):
            tokens[i, : len(text.tokens)] = text.tokens
            weight[i, : len(text.tokens)] = text.weights
        return cls(torch.from_numpy(tokens), torch.from_numpy(weight))

    def to(self, device: torch.device) -> WordBags:
        return WordBags(self.tokens.to(device), self.weight.to(device))


@dataclass(frozen=True)
class BranchSteps:
    """Latents h_k of a batch's branches, N in all, branch by branch with k = 0, 1, .., K.

    row (N,) and columns (N, M): places of the slots. branch (N,): numbered over the batch, `branches` in all.
    horizon, deepest, supervised, reward, done, accepted (N,): as in `BranchStep`. observation (N, O): o_k padded at the
    end, observation_length (N,). observation_weight (N, O): weights of its tokens in the loss, 0 for marks and padding.
    state: bags of the state's texts, one for each of `STATE_KINDS`; none if they are no targets.
    """

    row: Tensor
    columns: Tensor
    branch: Tensor
    horizon: Tensor
    deepest: Tensor
    supervised: Tensor
    reward: Tensor
    done: Tensor
    accepted: Tensor
    observation: Tensor
    observation_length: Tensor
    observation_weight: Tensor
    branches: int
    state: tuple[WordBags, ...]

    @classmethod
    def collate(
        cls, rows: Sequence[Sequence[BranchStep]], columns: Sequence[NDArray[np.int64]], slots: int, pad_id: int
    ) -> BranchSteps:
        """Collate latents of M = `slots` slots. columns: for each row, the batch column of each of its tokens."""
        steps = [(i, step) for i, row in enumerate(rows) for step in row]
        at = np.array([columns[i][step.places] for i, step in steps], dtype=np.int64)
        horizon = torch.tensor([step.horizon for _, step in steps], dtype=torch.long)
        observations = WordBags.collate([step.words for _, step in steps], pad_id)
        return cls(
            row=torch.tensor([i for i, _ in steps], dtype=torch.long),
            columns=torch.from_numpy(at.reshape(len(steps), slots)),  # without steps `at` is flat
            # Every branch starts with its h_0, so a horizon of 0 opens a new one.
            branch=(horizon == 0).long().cumsum(0) - 1,
            horizon=horizon,
            deepest=torch.tensor([step.deepest for _, step in steps], dtype=torch.long),
            supervised=torch.tensor([step.supervised for _, step in steps], dtype=torch.bool),
            reward=torch.tensor([step.reward for _, step in steps], dtype=torch.float32),
            done=torch.tensor([step.done for _, step in steps], dtype=torch.bool),
            accepted=torch.tensor([step.accepted for _, step in steps], dtype=torch.bool),
            observation=observations.tokens,
            observation_length=torch.tensor([len(step.words.tokens) for _, step in steps], dtype=torch.long),
            observation_weight=observations.weight,
            branches=int((horizon == 0).sum()),
            state=tuple(WordBags.collate(texts, pad_id) for texts in zip(*(s.state for _, s in steps), strict=True)),
        )

    @property
    def between(self) -> Tensor:
        """Steps k = 1, .., K - 1, which a deferred rollout does not decode: bool (N,)."""
        return (self.horizon > 0) & (self.horizon < self.deepest)

    def at_slots(self, h_BLD: Tensor) -> Tensor:
        """Gather the slots of a tensor (B, L, D): (N, M, D)."""
        return h_BLD[self.row[:, None], self.columns]

    def to(self, device: torch.device) -> BranchSteps:
        return replace(self, state=tuple(bags.to(device) for bags in self.state), **_moved(self, device))


def row_widths(rows: Sequence[TreeRow], layout: Layout) -> NDArray[np.int64]:
    """Return each row's columns in each block, rounded up to the multiple: (rows, blocks), at least two blocks."""
    counts = [np.bincount(layout(row), minlength=2) for row in rows]  # rows without branches have their block too
    blocks = max(map(len, counts))
    widths = np.array([np.pad(count, (0, blocks - len(count))) for count in counts])
    return -(-widths // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
