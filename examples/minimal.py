"""LoopWM in one file: the model, its training rows, the training loop and imagination, in plain PyTorch.

    python examples/minimal.py train --steps 200     train a small model on the episodes packed with the project
    python examples/minimal.py imagine               imagine with the shipped checkpoint

Read this file first. It imports nothing from `loopwm` and computes the same: tests/text/test_minimal.py compares losses
and imagined texts. The library adds batched serving, losses on latents, reward heads, data quotas and more processes.

A text world maps a history and an action to the next observation. The model is a decoder-only transformer whose middle
layers run T times with the same weights:

    e       = RMSNorm(prelude(x))                    x: embeddings of the tokens seen so far
    h^(0)   = noise in training, zeros otherwise
    h^(t+1) = block(A * h^(t) + B e)                 A: diagonal, every entry inside (0, 1)
    logits  = E f(coda(C h^(T)))                     E: token embeddings, shared with the input

Deferred decoding: after every action comes one `<|state|>` token. A plan of K actions is K such steps without the
observations between them; only the last observation is decoded. So a plan costs a few tokens an action.

Papers: LoopWM (the world model), Parcae (the contractive loop), Ouro (the exit gate).
Shapes: B batch, L positions, S keys, D width, H heads, E width of a head, V vocabulary, N targets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "loopwm/pretrained"
EPISODES = [ROOT / f"data_prep/packed/alfworld-train-{policy}.tar.xz" for policy in ("expert", "noisy")]
GOAL = "Your task is to boil water."
HALLWAY = "This room is called the hallway. In it, you see: \n\tthe agent\n\ta substance called air\nYou also see:\n"
HALLWAY += "\tA door to the kitchen (that is closed)\n\tA door to the workshop (that is open)"
PLAN = ["open door to kitchen", "go to kitchen"]

Slot = tuple[str, int, int]  # an attention call: part of the model, layer, loop
IGNORED = -100  # label of a position without a target, as in F.cross_entropy


@dataclass(frozen=True)
class Config:
    """Sizes of the model, named as in a checkpoint's config.json."""

    vocab_size: int
    hidden_size: int = 128
    num_attention_heads: int = 2
    num_key_value_heads: int = 2  # fewer than query heads: grouped-query attention
    head_dim: int = 64
    intermediate_size: int = 512
    prelude_layers: int = 1
    block_layers: int = 2
    coda_layers: int = 1
    mu_rec: float = 2.0  # mean of the Poisson depth in training
    max_loops: int = 6
    state_norm: bool = False  # h^(t+1) = RMSNorm(block(..)): the state keeps the size of e
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6


# --- Layers ---
class KVCache:
    """Keys and values of one sequence. A looped layer has an entry for each loop, since its input differs."""

    def __init__(self) -> None:
        self.length = 0  # tokens stored
        self.entries: dict[Slot, tuple[Tensor, Tensor]] = {}

    def append(self, slot: Slot, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values; return all of the slot."""
        if slot in self.entries:
            past_k, past_v = self.entries[slot]
            k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        self.entries[slot] = k, v
        return k, v

    def fill_deeper_loops(self, layers: int, loops: int, limit: int, new: int) -> None:
        """Fill the loops that `new` tokens skipped from their last one: later tokens may loop deeper and look there."""
        for layer, loop in itertools.product(range(layers), range(loops, limit)):
            k, v = self.entries["block", layer, loops - 1]
            self.append(("block", layer, loop), k[:, :, -new:], v[:, :, -new:])

    def fork(self) -> KVCache:
        """Return a copy that can grow alone. Tensors are shared: `append` never writes into one."""
        copy = KVCache()
        copy.length, copy.entries = self.length, dict(self.entries)
        return copy


@dataclass(frozen=True)
class Pass:
    """Inputs that all layers of a forward pass share."""

    cos: Tensor  # rotary angles, (B, 1, L, E)
    sin: Tensor
    sees: Tensor  # which keys each query may attend to, (B, 1, L, S) bool
    cache: KVCache | None = None  # None in training

    def select(self, rows: Tensor) -> Pass:
        return Pass(self.cos[rows], self.sin[rows], self.sees[rows], self.cache)


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (B, 1, L, E), for positions (B, L)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = (positions[:, None, :, None].float() * frequencies).repeat(1, 1, 1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head by their angles."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + swapped * sin


def attend(q: Tensor, k: Tensor, v: Tensor, shared: Pass, slot: Slot) -> Tensor:
    """Return attention (B, L, H * E) of queries (B, H, L, E); k and v may have fewer heads."""
    if shared.cache is not None:
        k, v = shared.cache.append(slot, k, v)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=shared.sees).transpose(1, 2).flatten(2)


def linear(inputs: int, outputs: int, std: float | None = None) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5 if std is None else std)
    return layer


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, L, H * E) -> (B, H, L, E)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class QueriesKeys(nn.Module):
    """Projections to queries and keys, normalised and rotated."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim, self.kv_dim = c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = linear(c.hidden_size, c.hidden_size)
        self.k_proj = linear(c.hidden_size, self.kv_dim)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def queries_keys(self, x: Tensor, shared: Pass) -> tuple[Tensor, Tensor]:
        q = rotate(self.q_norm(split_heads(self.q_proj(x), self.head_dim)), shared.cos, shared.sin)
        k = rotate(self.k_norm(split_heads(self.k_proj(x), self.head_dim)), shared.cos, shared.sin)
        return q, k


class Attention(QueriesKeys):
    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.v_proj = linear(c.hidden_size, self.kv_dim)
        # Output projections start at zero, so that a fresh layer is the identity and deep loops start stable.
        self.o_proj = linear(c.hidden_size, c.hidden_size, std=0.0)

    def forward(self, x: Tensor, shared: Pass, slot: Slot) -> Tensor:
        v = split_heads(self.v_proj(x), self.head_dim)
        return self.o_proj(attend(*self.queries_keys(x, shared), v, shared, slot))


class Layer(nn.Module):
    """A pre-norm transformer layer with a squared-ReLU MLP."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        up, down = (c.hidden_size, c.intermediate_size), (c.intermediate_size, c.hidden_size)
        self.mlp = nn.ModuleDict({"up_proj": linear(*up), "down_proj": linear(*down, std=0.0)})

    def forward(self, x: Tensor, shared: Pass, slot: Slot) -> Tensor:
        x = x + self.attention(self.attention_norm(x), shared, slot)
        return x + self.mlp["down_proj"](F.relu(self.mlp["up_proj"](self.mlp_norm(x))).square())


class Injection(nn.Module):
    """Contractive state retention: h' = A * h + B e (LoopWM, equations 6 and 7; Parcae, section 4.1).

    A = exp(-dt exp(a)) is the exact step of the decaying system dh/ds = -exp(a) h over a time dt = softplus(b).
    Every entry of A is inside (0, 1), so the state cannot blow up however often the block runs.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(dim))
        # Start at A = sqrt(1/5), where Parcae starts: dt = -log A, and b is its inverse softplus.
        self.b = nn.Parameter(torch.full((dim,), math.log(math.expm1(-math.log(math.sqrt(1 / 5))))))
        self.B = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.B.weight)

    def retention(self) -> Tensor:
        """Return the diagonal A, (D,)."""
        decay = F.softplus(self.b) * self.a.exp()
        # In float32, exp(-1e-4) < 1 and exp(-20) > 0 still hold; beyond these bounds A would round to 1 or 0.
        return torch.exp(-decay.clamp(1e-4, 20.0))

    def drive(self, e: Tensor) -> Tensor:
        """Return B e, (B, L, D). It is the same in every loop, so compute it once."""
        return F.softplus(self.b) * self.B(e)


class CopyAttention(QueriesKeys):
    """A pointer network in the form of attention: the values are token embeddings (ours, not LoopWM's).

    It lets the model write names that it never saw in training, by copying them from the context.
    """

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.gate = nn.Linear(c.hidden_size, 1)
        # At scale 8 a copied embedding can outweigh what the network itself would say.
        self.scale = nn.Parameter(torch.tensor([8.0]))
        narrow = self.kv_dim < c.hidden_size  # fewer key heads than query heads: a value is shorter than an embedding
        self.pack = linear(c.hidden_size, self.kv_dim) if narrow else nn.Identity()
        self.unpack = linear(c.hidden_size, c.hidden_size) if narrow else nn.Identity()

    def forward(self, h: Tensor, embeddings: Tensor, shared: Pass) -> Tensor:
        v = split_heads(self.pack(embeddings), self.head_dim)
        copied = self.unpack(attend(*self.queries_keys(h, shared), v, shared, ("copy", 0, 0)))
        return self.gate(h).sigmoid() * self.scale * copied


# --- The looped model ---
class LoopWM(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=c.hidden_size**-0.5)
        self.embed_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.prelude = nn.ModuleList(Layer(c) for _ in range(c.prelude_layers))
        self.input_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.injection = Injection(c.hidden_size)
        self.block = nn.ModuleList(Layer(c) for _ in range(c.block_layers))
        self.state_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps) if c.state_norm else nn.Identity()
        self.C = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        nn.init.eye_(self.C.weight)
        self.coda = nn.ModuleList(Layer(c) for _ in range(c.coda_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.copy = CopyAttention(c)
        # The exit gate g^(t) = sigmoid(w . h^(t) + b): the probability to stop after loop t (LoopWM, equation 12).
        self.gate = nn.Linear(c.hidden_size, 1)
        nn.init.zeros_(self.gate.weight)

    def encode_input(self, embeddings: Tensor, shared: Pass) -> Tensor:
        """Return B e for token embeddings, both (B, L, D) (LoopWM, equation 4)."""
        x = self.embed_norm(embeddings)
        for i, layer in enumerate(self.prelude):
            x = layer(x, shared, ("prelude", i, 0))
        return self.injection.drive(self.input_norm(x))

    def loop(self, h: Tensor, drive: Tensor, shared: Pass, t: int) -> Tensor:
        """Run the block once: h^(t) -> h^(t+1) (LoopWM, equation 5)."""
        h = self.injection.retention() * h + drive
        for i, layer in enumerate(self.block):
            h = layer(h, shared, ("block", i, t))
        return self.state_norm(h)

    def read_out(self, h: Tensor, embeddings: Tensor, shared: Pass) -> Tensor:
        """Return the hidden states (B, L, D) that `logits` reads (LoopWM, equation 8)."""
        h = self.C(h)
        for i, layer in enumerate(self.coda):
            h = layer(h, shared, ("coda", i, 0))
        h = self.norm(h)
        return h + self.copy(h, embeddings, shared)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embed_tokens.weight.T

    def shared_pass(self, positions: Tensor, sees: Tensor, cache: KVCache | None = None) -> Pass:
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        return Pass(*angles, sees[:, None], cache)

    def train_pass(self, batch: Batch, loops: Tensor, h: Tensor) -> Tensor:
        """Return hidden states (B, L, D), each row looped from h to its own depth; only the last loops carry gradients.

        Rows end together, so that a pass costs the mean depth and begins without gradients (Parcae, algorithm 2).
        """
        embeddings, shared = self.embed_tokens(batch.tokens), self.shared_pass(batch.positions, batch.sees)
        drive, deepest = self.encode_input(embeddings, shared), int(loops.max())
        for remaining in range(deepest, 0, -1):
            rows = (loops >= remaining).nonzero()[:, 0]
            with torch.set_grad_enabled(remaining <= math.ceil(self.config.mu_rec / 2)):
                updated = self.loop(h[rows], drive[rows], shared.select(rows), deepest - remaining)
                h = h.index_copy(0, rows, updated)
        return self.read_out(h, embeddings, shared)

    @torch.no_grad()
    def feed(self, cache: KVCache, tokens: Sequence[int], limit: int, threshold: float | None = None) -> Tensor:
        """Append tokens to a cached sequence; return the hidden state of the last one, (D,).

        They loop `limit` times, or until the exit gate of the last token exceeds `threshold`.
        """
        start, new = cache.length, len(tokens)
        sees = torch.ones(1, new, start + new, dtype=torch.bool).tril(start)
        shared = self.shared_pass(torch.arange(start, start + new)[None], sees, cache)
        embeddings = self.embed_tokens(torch.tensor([tokens]))
        drive = self.encode_input(embeddings, shared)
        h, t = torch.zeros_like(drive), 0
        while t < limit:
            h, t = self.loop(h, drive, shared, t), t + 1
            if threshold is not None and self.gate(h[0, -1]).sigmoid() > threshold:
                break
        cache.fill_deeper_loops(len(self.block), t, limit, new)
        cache.length += new
        return self.read_out(h, embeddings, shared)[0, -1]


# --- Training rows ---
@dataclass(frozen=True)
class Episode:
    """Token ids of an episode; observations[0] opens it and actions[0] is empty."""

    goal: list[int]
    observations: list[list[int]]
    actions: list[list[int]]


class Template:
    """Token ids of the marks between texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        marks = list(tokenizer.encode("<|goal|><|obs|><|act|><|state|><|end|><|pad|>").ids)
        self.goal, self.obs, self.act, self.state, self.end, self.pad = marks

    def encode(self, text: str) -> list[int]:
        """Tokenise a text. It cannot spell a mark: `<|` is broken up."""
        return list(self.tokenizer.encode(text.strip().replace("<|", "< |"), add_special_tokens=False).ids)

    def context(self, goal: list[int], observation: list[int]) -> list[int]:
        return [self.goal, *goal, self.obs, *observation, self.end]

    def step(self, action: list[int]) -> list[int]:
        return [self.act, *action, self.state]

    def observation(self, text: list[int]) -> list[int]:
        return [self.obs, *text, self.end]


@dataclass
class Row:
    """A trunk with branches, all in one sequence; parallel lists over its tokens.

        trunk     goal obs0   act1 state obs1   act2 state obs2   act3 state obs3 ...
        branch                             \\ act2 state act3 state obs3

    The trunk trains one-step prediction at every step. A branch trains deferred decoding: it leaves the trunk after
    some step, takes K actions and decodes the last observation only. It attends to the trunk up to where it left, and
    to itself, so many branches share one trunk without extra passes.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # a branch continues from the position where it left
    branch: list[int] = field(default_factory=list)  # 0 for the trunk, otherwise the branch's number
    limit: list[int] = field(default_factory=list)  # trunk tokens that a token may attend to
    labels: list[int] = field(default_factory=list)  # the next token where it is a target, otherwise IGNORED

    def append(self, tokens: list[int], position: int, branch: int, limit: int | None, targets: bool) -> int:
        """Append tokens from `position` on; return the position after them. limit None: all trunk tokens before."""
        end = position + len(tokens)
        self.tokens += tokens
        self.positions += range(position, end)
        self.branch += [branch] * len(tokens)
        self.limit += range(position + 1, end + 1) if limit is None else [limit] * len(tokens)
        self.labels += [*tokens[1:], IGNORED] if targets else [IGNORED] * len(tokens)
        return end


def make_row(episode: Episode, branches: Sequence[tuple[int, int]], marks: Template) -> Row:
    """Lay out an episode as trunk; branches: pairs (step after which it leaves, its number of actions K)."""
    row = Row()
    end = row.append(marks.context(episode.goal, episode.observations[0]), 0, 0, None, targets=False)
    ends = [end]
    for action, observation in zip(episode.actions[1:], episode.observations[1:], strict=True):
        end = row.append(marks.step(action), end, 0, None, targets=False)
        end = row.append(marks.observation(observation), end, 0, None, targets=True)
        ends.append(end)
    for number, (step, depth) in enumerate(branches, start=1):
        position = left = ends[step]
        for k in range(step + 1, step + depth + 1):
            position = row.append(marks.step(episode.actions[k]), position, number, left, targets=False)
        row.append(marks.observation(episode.observations[step + depth]), position, number, left, targets=True)
    return row


@dataclass(frozen=True)
class Batch:
    """Rows padded at their ends."""

    tokens: Tensor  # (B, L), as positions and labels
    positions: Tensor
    labels: Tensor
    sees: Tensor  # (B, L, L) bool


def collate(rows: Sequence[Row], pad: int) -> Batch:
    length = max(len(row.tokens) for row in rows)

    def padded(lists: Sequence[list[int]], fill: int) -> Tensor:
        return torch.tensor([values + [fill] * (length - len(values)) for values in lists])

    branch, limit = padded([row.branch for row in rows], -1), padded([row.limit for row in rows], 0)
    # Key j is visible to query i if it comes before and is of the same branch, or of the trunk before the limit.
    place = torch.arange(length)
    same = branch[:, :, None] == branch[:, None, :]
    in_trunk = (branch[:, None, :] == 0) & (place < limit[:, :, None])
    sees = (same | in_trunk) & (place <= place[:, None])
    tokens, positions = padded([row.tokens for row in rows], pad), padded([row.positions for row in rows], 0)
    return Batch(tokens, positions, padded([row.labels for row in rows], IGNORED), sees)


# --- Training ---
def draw_depth(seed: int, step: int, batch: Batch, c: Config) -> tuple[Tensor, Tensor]:
    """Draw loops (B,) by a Poisson distribution, and h^(0) (B, L, D) (LoopWM, equation 9; Parcae, table 18).

    Training over many depths is what lets the model stop early, or run deeper, afterwards. Both draws depend on
    (seed, step, row) only, so that a resumed or differently split run draws the same.
    """
    loops, noise = [], []
    # A normal distribution cut at 3 standard deviations, by the inverse of its distribution function.
    tail, std = 0.5 * math.erfc(3 / math.sqrt(2)), math.sqrt(2 / (5 * c.hidden_size))
    for row in range(len(batch.tokens)):
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step, row))))
        loops.append(min(max(1, int(rng.poisson(c.mu_rec))), c.max_loops))
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        uniform = torch.rand(batch.tokens.shape[1], c.hidden_size, generator=generator)
        noise.append(std * torch.special.ndtri(tail + uniform * (1 - 2 * tail)))
    return torch.tensor(loops), torch.stack(noise)


def observation_losses(model: LoopWM, stream: Iterator[Batch], seed: int = 0) -> Iterator[Tensor]:
    """Yield the mean cross-entropy of the target tokens of each batch (LoopWM, equation 10)."""
    for step, batch in enumerate(stream):
        hidden = model.train_pass(batch, *draw_depth(seed, step, batch, model.config))
        targets = batch.labels != IGNORED
        yield F.cross_entropy(model.logits(hidden[targets]), batch.labels[targets])


def gate_loss(model: LoopWM, batch: Batch, limit: int) -> Tensor:
    """Return the loss of the exit gate, of a model that is finished (Ouro, section 3.4).

    A loop was worth running if it lowered the token's loss. The label is that gain, squashed: at 0.005 nats it is one
    half. Train this after the model and with the model frozen: a gate that trains along has no stable labels.
    """
    targets = batch.labels != IGNORED
    losses = []
    with torch.no_grad():
        embeddings, shared = model.embed_tokens(batch.tokens), model.shared_pass(batch.positions, batch.sees)
        drive = model.encode_input(embeddings, shared)
        states = [torch.zeros_like(drive)]
        for t in range(limit):
            states.append(model.loop(states[-1], drive, shared, t))
            logits = model.logits(model.read_out(states[-1], embeddings, shared)[targets])
            losses.append(F.cross_entropy(logits, batch.labels[targets], reduction="none"))
    gates = [model.gate(h[targets])[:, 0] for h in states[1:]]
    loss_NT, gate_NT = torch.stack(losses, dim=1), torch.stack(gates, dim=1)
    continues = torch.sigmoid(50 * ((loss_NT[:, :-1] - loss_NT[:, 1:]).clamp(min=0) - 0.005))
    # The first loop always runs, so its gate has no label. A gate says stop, a label says continue: hence the sign.
    return F.binary_cross_entropy_with_logits(-gate_NT[:, 1:], continues)


def read_episodes(files: Sequence[Path], marks: Template, max_steps: int) -> Iterator[Episode]:
    """Read packed episodes, archives of JSON lines; take the first `max_steps` steps of each."""
    for path in files:
        with tarfile.open(path) as archive:
            for member in archive:
                for line in (archive.extractfile(member) or ()) if ".jsonl" in member.name else ():
                    record = json.loads(line)
                    steps = record["steps"][: max_steps + 1]
                    texts = ([marks.encode(step[name] or "") for step in steps] for name in ("observation", "action"))
                    yield Episode(marks.encode(record["goal"]), *texts)


def batches(episodes: Sequence[Episode], marks: Template, size: int, seed: int) -> Iterator[Batch]:
    """Yield batches for ever, with two new branches of 2 to 5 actions a row. One action is the trunk's job."""
    rng = np.random.default_rng(seed)

    def draw(episode: Episode) -> Row:
        last = len(episode.actions) - 1
        starts = [int(step) for step in rng.integers(0, max(1, last - 1), size=2) if last - step >= 2]
        return make_row(episode, [(s, int(rng.integers(2, min(5, last - s) + 1))) for s in starts], marks)

    while True:
        order = rng.permutation(len(episodes))
        for start in range(0, len(order) - size + 1, size):
            yield collate([draw(episodes[i]) for i in order[start : start + size]], marks.pad)


def train(parameters: Sequence[nn.Parameter], losses: Iterator[Tensor], rate: float = 3e-3) -> Iterator[float]:
    """Take an AdamW step for each loss, which must be computed lazily; yield the losses as numbers."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        # A rare deep row can have a gradient many times the usual one.
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield loss.item()


# --- Imagination ---
class World:
    """An imagined world: a cached history and the actions taken since.

    `advance` is cheap, since nothing is decoded; `decode` leaves the world as it is, so that you can go on from it.
    """

    def __init__(self, model: LoopWM, marks: Template, loops: int, threshold: float | None = None) -> None:
        self.model, self.marks, self.loops, self.threshold = model, marks, loops, threshold
        self.cache = KVCache()

    def encode(self, goal: str, observation: str) -> None:
        """Read what was seen. A context always runs at full depth: every later token depends on it."""
        tokens = self.marks.context(self.marks.encode(goal), self.marks.encode(observation))
        self.model.feed(self.cache, tokens, self.loops)

    def advance(self, action: str) -> None:
        """Take an action (LoopWM, equations 16 and 17). Its `<|state|>` token carries the new latent state."""
        self.model.feed(self.cache, self.marks.step(self.marks.encode(action)), self.loops, self.threshold)

    def decode(self, max_tokens: int = 200) -> str:
        """Decode the present observation greedily (LoopWM, equation 18)."""
        cache, token = self.cache.fork(), self.marks.obs
        written: list[int] = []
        while len(written) < max_tokens:
            hidden = self.model.feed(cache, [token], self.loops, self.threshold)
            token = int(self.model.logits(hidden).argmax())
            if token == self.marks.end:
                break
            written.append(token)
        return str(self.marks.tokenizer.decode(written, skip_special_tokens=True))


def load_checkpoint(folder: Path) -> tuple[LoopWM, Template]:
    """Load a checkpoint of the library."""
    c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    marks = Template(Tokenizer.from_file(str(folder / "tokenizer.json")))
    model = LoopWM(Config(**{field.name: c[field.name] for field in fields(Config) if field.name in c}))
    shards = [load_file(shard) for shard in sorted(folder.glob("model*.safetensors"))]
    load_weights(model, {name: value.float() for shard in shards for name, value in shard.items()})
    return model.eval(), marks


def load_weights(model: LoopWM, weights: dict[str, Tensor]) -> None:
    """Take the weights of a library model. It has heads that this one lacks, and may have no gate: hence not strict."""
    names = {name: name.replace("model.", "").replace("core.", "").replace("gate.linear", "gate") for name in weights}
    model.load_state_dict({names[name]: value for name, value in weights.items()}, strict=False)


def run_training(steps: int) -> None:
    torch.manual_seed(0)
    marks = Template(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))
    episodes = list(read_episodes(EPISODES, marks, max_steps=12))
    model = LoopWM(Config(vocab_size=marks.tokenizer.get_vocab_size()))
    print(f"{len(episodes)} episodes, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    stream = batches(episodes, marks, size=8, seed=0)
    losses = observation_losses(model, itertools.islice(stream, steps))
    for step, loss in enumerate(train(list(model.parameters()), losses), start=1):
        print(f"step {step}: loss {loss:.3f}")
    losses = (gate_loss(model, batch, limit=4) for batch in itertools.islice(stream, steps // 10))
    for loss in train(list(model.gate.parameters()), losses):
        print(f"gate: loss {loss:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="LoopWM in one file.")
    parser.add_argument("command", choices=("train", "imagine"))
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--loops", type=int, default=2, help="most loops of a token that is imagined")
    parser.add_argument("--threshold", type=float, help="stop looping when the exit gate exceeds this")
    arguments = parser.parse_args()
    if arguments.command == "train":
        run_training(arguments.steps)
    else:
        world = World(*load_checkpoint(CHECKPOINT), arguments.loops, arguments.threshold)
        world.encode(GOAL, HALLWAY)
        for action in PLAN:
            print(f"> {action}")
            world.advance(action)
        print(world.decode())
