"""Attention of training rows: a causal trunk, and branches that attend to their trunk and themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from loopwm.core.block import for_queries
from loopwm.core.training_attention import training_attention


@dataclass(frozen=True)
class TreeMask:
    """Attention mask of a batch whose first `trunk` columns are trunks, where attention is causal.

    branches: (B, 1, L - trunk, L) bool, True where a branch position attends.
    """

    trunk: int
    branches: Tensor

    def __getitem__(self, rows: Tensor) -> TreeMask:
        return TreeMask(self.trunk, self.branches[rows])

    def stage(self, start: int, end: int) -> TreeMask:
        """Cut the mask to queries start .. end and keys before `end`. `start` is 0 or at least the trunk's end."""
        # Stage 0 contains the trunk, for which there are no mask rows.
        skipped = max(0, start - self.trunk)
        return TreeMask(0 if start else self.trunk, self.branches[:, :, skipped : end - self.trunk, :end])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with new queries, whose keys are the last of k: (B, H, L, E); k, v: (B, G, S, E)."""
        k, v = for_queries(k, q.shape[1]), for_queries(v, q.shape[1])
        t, parts = self.trunk, []
        if t:
            # The trunk apart and causal: a mask would make the kernel compute its upper triangle.
            parts.append(F.scaled_dot_product_attention(q[:, :, :t], k[:, :, :t], v[:, :, :t], is_causal=True))
        if t < q.shape[2]:
            parts.append(F.scaled_dot_product_attention(q[:, :, t:], k, v, attn_mask=self.branches))
        return torch.cat(parts, dim=2)


KEYS_MULTIPLE, QUERIES_MULTIPLE = 64, 16
"""Multiples of trunk columns and own columns of a branch's attention, so that few shapes occur."""


@dataclass(frozen=True)
class BranchSpan:
    """Columns start .. end of a branch, counted from the trunk's end, which attends to trunk columns before `limit`.

    visible: (end - start, limit + end - start) bool over these trunk columns and the branch's own.
    """

    start: int
    end: int
    limit: int
    visible: Tensor


@dataclass(frozen=True)
class BranchMask:
    """A `TreeMask` split by branches: each attends to its trunk and itself, and no other column is computed.

    rows: branches of each row in the order of their columns, without gaps. Padding attends to nothing and gets zeros.
    """

    trunk: int
    rows: tuple[tuple[BranchSpan, ...], ...]

    def __getitem__(self, rows: Tensor) -> BranchMask:
        return BranchMask(self.trunk, tuple(self.rows[i] for i in rows.tolist()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: (B, H, L, E); k, v: (B, G, L, E)."""
        sizes = [self.trunk, q.shape[2] - self.trunk]
        # Split every tensor once: each separate slice would back-propagate a gradient of the whole tensor's size.
        (trunk_q, branch_q), (trunk_k, branch_k), (trunk_v, branch_v) = (x.split(sizes, dim=2) for x in (q, k, v))
        trunk = training_attention(trunk_q, trunk_k, trunk_v)
        parts = (trunk_k, trunk_v, branch_q, branch_k, branch_v)
        rows = [_attend_branches(spans, *row) for spans, *row in zip(self.rows, *map(torch.unbind, parts), strict=True)]
        return torch.cat((trunk, torch.stack(rows)), dim=2)


def _attend_branches(
    spans: Sequence[BranchSpan], trunk_k: Tensor, trunk_v: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attend for a row's branch columns (H, L, E), one call a branch; their k, v (G, L, E), the trunk's (G, P, E)."""
    padding = q.shape[1] - (spans[-1].end if spans else 0)
    sizes = [span.end - span.start for span in spans] + [padding]
    # Cut the trunk at every limit once; a branch then concatenates the pieces up to its own.
    limits = sorted({span.limit for span in spans})
    pieces = [b - a for a, b in itertools.pairwise((0, *limits, trunk_k.shape[1]))]
    own = zip(spans, *(x.split(sizes, dim=1) for x in (q, k, v)), strict=False)  # the last part is padding
    pieces_of_trunk = [x.split(pieces, dim=1) for x in (trunk_k, trunk_v)]
    outs = []
    for span, q_HLE, *own_kv in own:
        count = limits.index(span.limit) + 1  # pieces of the trunk up to its limit
        keys, values = (torch.cat((*trunk[:count], x), dim=1) for trunk, x in zip(pieces_of_trunk, own_kv, strict=True))
        outs.append(_looked_up_evenly(q_HLE, keys, values, span.visible))
    return torch.cat((*outs, q.new_zeros(q.shape[0], padding, q.shape[2])), dim=1)


def _looked_up_evenly(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attend for one branch (H, L, E), padded to the next multiple of columns."""
    length = q.shape[1]
    more = -length % QUERIES_MULTIPLE
    q, k, v = (F.pad(x, (0, 0, 0, more))[None] for x in (q, k, v))
    visible = F.pad(visible, (0, more, 0, more))
    visible[length:, 0] = True  # a softmax over no keys would be NaN
    return training_attention(q, k, v, visible)[0, :, :length]


@dataclass(frozen=True)
class PackedMask:
    """Attention mask of lines that hold several rows each, by the fields of `PackedBatch`, (B, L) each.

    blocks: the same for the GPU's kernel, which skips hidden blocks; None on CPU.
    """

    start: Tensor
    limit: Tensor
    branch: Tensor
    decode: Tensor
    blocks: BlockMask | None

    @classmethod
    def of(cls, start: Tensor, limit: Tensor, branch: Tensor, decode: Tensor) -> PackedMask:
        """Build the mask, with blocks on a GPU."""
        mask = cls(start, limit, branch, decode, None)
        if not start.is_cuda:
            return mask
        lines, length = start.shape
        visible = _visible(start, limit, branch, decode)
        return replace(mask, blocks=_compiled(create_block_mask)(visible, lines, None, length, length, start.device))

    def __getitem__(self, rows: Tensor) -> PackedMask:
        return PackedMask.of(self.start[rows], self.limit[rows], self.branch[rows], self.decode[rows])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: (B, H, L, E); k, v: (B, G, L, E)."""
        if self.blocks is not None:
            return _compiled(flex_attention)(q, k, v, block_mask=self.blocks, enable_gqa=True)
        line, column = torch.arange(len(q))[:, None, None, None], torch.arange(q.shape[2])
        mask = _visible(self.start, self.limit, self.branch, self.decode)(line, None, column[:, None], column)
        k, v = for_queries(k, q.shape[1]), for_queries(v, q.shape[1])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _visible(start: Tensor, limit: Tensor, branch: Tensor, decode: Tensor) -> Callable[..., Tensor]:
    """Return the function that says whether query column q of line b attends to key column k; indices broadcast."""

    def visible(b: Tensor, h: Any, q: Tensor, k: Tensor) -> Tensor:
        in_trunk = (k >= start[b, q]) & (k < limit[b, q])
        same_branch = (branch[b, q] > 0) & (branch[b, k] == branch[b, q]) & (k <= q)
        spine_or_own = (decode[b, k] == 0) | (decode[b, k] == decode[b, q])
        return in_trunk | (same_branch & spine_or_own) | (k == q)  # padding sees itself: a softmax needs a key

    return visible


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def tree_attention(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: TreeMask | BranchMask | PackedMask) -> Tensor:
    """Attend for training rows, without a cache, the same in every slot. Trunk queries do not pay for the branches."""
    return mask.attend(q, k, v).transpose(1, 2).flatten(2)
