"""Training rows: a teacher-forced trunk with deferred branches, all in one masked pass.

The trunk is a context as `format` renders it. A branch leaves it after some step: state slots, then action and state
slots for each horizon k. The observation of horizon k hangs off the branch's spine in a side branch of its own, so
that no later action sees it. Branches read the trunk's keys and values up to where they left, and nothing of each
other.

    trunk    <|goal|>g .. <|obs|>o0<|end|> <|act|>a1 <|obs|>o1<|end|> <|act|>a2 <|obs|>o2<|end|> ..
    branch        at step 1: <|state|> <|act|>a2<|state|> <|act|>a3<|state|> ..
    decode                                     <|obs|>o2<|end|>    <|obs|>o3<|end|>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Tokens = NDArray[np.integer]

IGNORED = -100
"""Label of a position without a target."""

TRUNK_HORIZON = 0


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
    """A tokenised episode of n steps. Index 0 of the lists is the reset, whose action is empty."""

    goal: Tokens
    observations: Sequence[Tokens]
    actions: Sequence[Tokens]
    looks: Sequence[Tokens | None]
    inventories: Sequence[Tokens | None]

    @property
    def last_step(self) -> int:
        return len(self.observations) - 1


@dataclass(frozen=True)
class RowPlan:
    """What of an episode a row shows.

    head: step whose observation opens the context; with_snapshot: look and inventory of that step stand before it.
    first, last: the steps after the head that follow in the trunk (first > last: none).
    branches: (step the branch leaves after, horizons K). supervise_trunk: the trunk's observations are targets too.
    """

    head: int
    with_snapshot: bool
    first: int
    last: int
    branches: tuple[tuple[int, int], ...]
    supervise_trunk: bool


@dataclass
class TreeRow:
    """One row of a batch: parallel lists over its tokens.

    limit: trunk tokens a position may see; branch: 0 trunk, else its number; decode: 0 spine, else the horizon
    decoded there; label: the next token where it is a target; horizon: that target's horizon, 0 in the trunk.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    limit: list[int] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    horizon: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trunk_length(self) -> int:
        return self.branch.count(0)

    def append(self, tokens: Sequence[int], position: int, limit: int, branch: int, decode: int) -> int:
        """Adds tokens without targets at consecutive positions; returns the position after them."""
        n = len(tokens)
        self.tokens += tokens
        self.positions += range(position, position + n)
        self.limit += [limit] * n
        self.branch += [branch] * n
        self.decode += [decode] * n
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

    def __init__(self, ids: TemplateIds, state_slots: int) -> None:
        self.ids = ids
        self.slots = [ids.state] * state_slots

    def build(self, episode: TokenEpisode, plan: RowPlan) -> TreeRow:
        row = TreeRow()
        ends = self._trunk(row, episode, plan)
        for number, (step, horizons) in enumerate(plan.branches, start=1):
            self._branch(row, episode, ends[step], number, step, horizons)
        return row

    def head(self, episode: TokenEpisode, step: int, with_snapshot: bool) -> list[int]:
        """Tokens up to the end of the first shown observation. Raises ValueError if a snapshot is not recorded."""
        tokens = [self.ids.goal, *episode.goal]
        if with_snapshot:
            look, inventory = episode.looks[step], episode.inventories[step]
            if look is None or inventory is None:
                raise ValueError(f"step {step} has no look or inventory")
            tokens += [self.ids.look, *look, self.ids.inv, *inventory]
        return tokens + self._observation(episode, step)

    def _observation(self, episode: TokenEpisode, step: int) -> list[int]:
        return [self.ids.obs, *episode.observations[step], self.ids.end]

    def _trunk(self, row: TreeRow, episode: TokenEpisode, plan: RowPlan) -> dict[int, int]:
        """Appends the trunk; returns the trunk length after each of its steps."""
        position = self._trunk_part(row, self.head(episode, plan.head, plan.with_snapshot), 0)
        ends = {plan.head: position}
        for step in range(plan.first, plan.last + 1):
            position = self._trunk_part(row, [self.ids.act, *episode.actions[step]], position)
            observation = self._observation(episode, step)
            position = self._trunk_part(row, observation, position)
            if plan.supervise_trunk:
                row.supervise_last(len(observation) - 1, TRUNK_HORIZON)
            ends[step] = position
        return ends

    def _trunk_part(self, row: TreeRow, tokens: list[int], position: int) -> int:
        end = row.append(tokens, position, 0, 0, 0)
        row.limit[position:end] = range(position + 1, end + 1)
        return end

    def _branch(self, row: TreeRow, episode: TokenEpisode, end: int, number: int, step: int, horizons: int) -> None:
        position = row.append(self.slots, end, end, number, 0)
        for k in range(1, horizons + 1):
            spine = [self.ids.act, *episode.actions[step + k], *self.slots]
            position = row.append(spine, position, end, number, 0)
            observation = self._observation(episode, step + k)
            row.append(observation, position, end, number, k)
            row.supervise_last(len(observation) - 1, k)


@dataclass(frozen=True)
class TreeMask:
    """Who sees whom in a batch whose first `trunk` columns are trunks: there attention is plainly causal.

    branches: (B, 1, L - trunk, L) bool, True where a branch position may look.
    """

    trunk: int
    branches: Tensor

    def __getitem__(self, rows: Tensor) -> TreeMask:
        return TreeMask(self.trunk, self.branches[rows])


def tree_attention(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: TreeMask) -> Tensor:
    """An `Attend` for training rows: no cache, every slot alike. Trunk queries never pay for the branches."""
    t = mask.trunk
    parts = [F.scaled_dot_product_attention(q[:, :, :t], k[:, :, :t], v[:, :, :t], is_causal=True)]
    if t < q.shape[2]:
        parts.append(F.scaled_dot_product_attention(q[:, :, t:], k, v, attn_mask=mask.branches))
    return torch.cat(parts, dim=2).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class TreeBatch:
    """Rows padded to one length L: every tensor (B, L). The first `trunk` columns hold the trunks, padded at their
    end, the others the branches. Padding has branch -1 and no targets. `place` is the index of a token in its row.

    `row_ids` are the rows' indices in the global batch.
    """

    tokens: Tensor
    positions: Tensor
    limit: Tensor
    branch: Tensor
    decode: Tensor
    label: Tensor
    horizon: Tensor
    place: Tensor
    trunk: int
    row_ids: tuple[int, ...]

    @classmethod
    def collate(cls, rows: Sequence[TreeRow], row_ids: Sequence[int], pad_id: int) -> TreeBatch:
        trunk = max(row.trunk_length for row in rows)
        length = trunk + max(len(row) - row.trunk_length for row in rows)

        def padded(values: Sequence[Sequence[int]], fill: int) -> Tensor:
            out = np.full((len(rows), length), fill, dtype=np.int64)
            for i, row in enumerate(rows):
                t = row.trunk_length
                out[i, :t] = values[i][:t]
                out[i, trunk : trunk + len(row) - t] = values[i][t:]
            return torch.from_numpy(out)

        return cls(
            tokens=padded([row.tokens for row in rows], pad_id),
            positions=padded([row.positions for row in rows], 0),
            limit=padded([row.limit for row in rows], 0),
            branch=padded([row.branch for row in rows], -1),
            decode=padded([row.decode for row in rows], 0),
            label=padded([row.label for row in rows], IGNORED),
            horizon=padded([row.horizon for row in rows], TRUNK_HORIZON),
            place=padded([range(len(row)) for row in rows], 0),
            trunk=trunk,
            row_ids=tuple(row_ids),
        )

    @staticmethod
    def padded_size(rows: Sequence[TreeRow]) -> int:
        """Tokens of a batch of these rows, padding included."""
        trunk = max(row.trunk_length for row in rows)
        return len(rows) * (trunk + max(len(row) - row.trunk_length for row in rows))

    def to(self, device: torch.device) -> TreeBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return TreeBatch(**moved, trunk=self.trunk, row_ids=self.row_ids)

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
