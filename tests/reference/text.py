"""The text model written out a second time with numpy, in float64: one vector and one head at a time, no cache.

    x       = RMSNorm(E[tokens])
    e       = RMSNorm(prelude(x))
    h^(0)   = 0,    h^(t+1) = block(A_bar * h^(t) + dt * B e),    A_bar = exp(-dt exp(a)),    dt = log(1 + exp(b))
    h       = coda(C h^(T))
    f       = RMSNorm(h) + sigmoid(w . f' + c) * s * copy(f')       with f' = RMSNorm(h)
    logits  = E f
    r       = h' + W_o attention(q from h', k and v from [h^(T)'; h'])    with x' = x of unit size
    outcome = (r + W_2 relu(W_1 r' + b_1)^2 + b_2)'

A layer is x + attention(RMSNorm(x)), then x + W_2 relu(W_1 RMSNorm(x))^2. Queries and keys go through RMSNorm and
rotary positions; query head i reads key head i // group, where a model has fewer of these. Values of the copy attention
are E[tokens]; where heads share them, P E[tokens], and U leads back what is copied. Who sees whom is said by a matrix.
Takes the weights of a `LoopWMForCausalLM` by name and shares no code with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Sees = NDArray[np.bool_]
"""sees[i, j]: position i attends to position j, (L, L)."""


@dataclass(frozen=True)
class Sizes:
    """heads: of queries; key_heads: of keys and values, a divisor of them."""

    heads: int
    key_heads: int
    prelude: int
    block: int
    coda: int
    theta: float
    eps: float


def rms_norm(x: Vector, weight: Vector, eps: float) -> Vector:
    return weight * x / math.sqrt(sum(v * v for v in x) / len(x) + eps)


def rotated(x: Vector, position: int, theta: float) -> Vector:
    """Each pair (i, i + E/2) of a head's vector (E,) turned by position * theta^(-2i/E)."""
    size = len(x)
    out = np.empty(size)
    for i in range(size // 2):
        angle = position * theta ** (-2 * i / size)
        out[i] = x[i] * math.cos(angle) - x[i + size // 2] * math.sin(angle)
        out[i + size // 2] = x[i + size // 2] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class TextReference:
    def __init__(self, weights: Mapping[str, NDArray[np.floating]], sizes: Sizes) -> None:
        """weights: by their names in `LoopWMForCausalLM`."""
        self.w = {name.removeprefix("model."): np.asarray(w, dtype=np.float64) for name, w in weights.items()}
        self.sizes = sizes

    def logits(self, tokens: Sequence[int], positions: Sequence[int], sees: Sees, loops: int) -> Matrix:
        """(L, V) of a row."""
        embeds = [self.w["embed_tokens.weight"][token] for token in tokens]
        latents = self.latents(embeds, positions, sees, loops)
        finals = [self._norm("norm", h) for h in latents]
        if "copy.scale" in self.w:
            copied = self._copies(finals, embeds, positions, sees)
            finals = [f + c for f, c in zip(finals, copied, strict=True)]
        return np.stack([self.w["embed_tokens.weight"] @ f for f in finals])

    def latents(self, embeds: list[Vector], positions: Sequence[int], sees: Sees, loops: int) -> list[Vector]:
        """coda(C h^(T)) at every position."""
        return self._read_out(self._states(embeds, positions, sees, loops), positions, sees)

    def outcomes(self, embeds: list[Vector], positions: Sequence[int], sees: Sees, loops: int) -> list[Vector]:
        """What heads of rewards and ends read at every position, for one slot each."""
        states = self._states(embeds, positions, sees, loops)
        hs = [self._unit(h) for h in self._read_out(states, positions, sees)]
        both = [np.concatenate([self._unit(state), h]) for state, h in zip(states, hs, strict=True)]
        queries = self._turned_heads("reward_attention.q", hs, self.sizes.heads, positions)
        keys = self._turned_heads("reward_attention.k", both, self.sizes.key_heads, positions)
        values = [np.split(self.w["reward_attention.v_proj.weight"] @ x, self.sizes.key_heads) for x in both]
        found = self._attend(queries, keys, values, sees)
        out = []
        for h, f in zip(hs, found, strict=True):
            r = h + self.w["reward_attention.o_proj.weight"] @ f
            hidden = self.w["heads.outcome.up.weight"] @ self._unit(r) + self.w["heads.outcome.up.bias"]
            squares = np.array([v * v if v > 0 else 0.0 for v in hidden])
            out.append(
                self._unit(r + self.w["heads.outcome.down.weight"] @ squares + self.w["heads.outcome.down.bias"])
            )
        return out

    def _unit(self, x: Vector) -> Vector:
        return rms_norm(x, np.ones(len(x)), self.sizes.eps)

    def _states(self, embeds: list[Vector], positions: Sequence[int], sees: Sees, loops: int) -> list[Vector]:
        """h^(T) at every position."""
        xs = [self._norm("embed_norm", v) for v in embeds]
        for i in range(self.sizes.prelude):
            xs = self._layer(f"core.prelude.{i}", xs, positions, sees)
        dt = np.log1p(np.exp(self.w["core.injection.b"]))
        keep = np.exp(-dt * np.exp(self.w["core.injection.a"]))
        drive = [dt * (self.w["core.injection.B.weight"] @ self._norm("core.input_norm", x)) for x in xs]
        hs = [np.zeros_like(x) for x in xs]
        for _ in range(loops):
            hs = [keep * h + d for h, d in zip(hs, drive, strict=True)]
            for i in range(self.sizes.block):
                hs = self._layer(f"core.block.{i}", hs, positions, sees)
        return hs

    def _read_out(self, hs: list[Vector], positions: Sequence[int], sees: Sees) -> list[Vector]:
        hs = [self.w["core.C.weight"] @ h for h in hs]
        for i in range(self.sizes.coda):
            hs = self._layer(f"core.coda.{i}", hs, positions, sees)
        return hs

    def _norm(self, name: str, x: Vector) -> Vector:
        return rms_norm(x, self.w[f"{name}.weight"], self.sizes.eps)

    def _layer(self, name: str, xs: list[Vector], positions: Sequence[int], sees: Sees) -> list[Vector]:
        normed = [self._norm(f"{name}.attention_norm", x) for x in xs]
        queries = self._turned_heads(f"{name}.attention.q", normed, self.sizes.heads, positions)
        keys = self._turned_heads(f"{name}.attention.k", normed, self.sizes.key_heads, positions)
        values = [np.split(self.w[f"{name}.attention.v_proj.weight"] @ x, self.sizes.key_heads) for x in normed]
        mixed = self._attend(queries, keys, values, sees)
        xs = [x + self.w[f"{name}.attention.o_proj.weight"] @ m for x, m in zip(xs, mixed, strict=True)]
        return [x + self._mlp(f"{name}.mlp", self._norm(f"{name}.mlp_norm", x)) for x in xs]

    def _mlp(self, name: str, x: Vector) -> Vector:
        hidden = self.w[f"{name}.up_proj.weight"] @ x
        return self.w[f"{name}.down_proj.weight"] @ np.array([v * v if v > 0 else 0.0 for v in hidden])

    def _copies(self, finals: list[Vector], embeds: list[Vector], positions: Sequence[int], sees: Sees) -> list[Vector]:
        """sigmoid(gate) * scale * attention with token embeddings, or what they are packed into, as values."""
        queries = self._turned_heads("copy.q", finals, self.sizes.heads, positions)
        keys = self._turned_heads("copy.k", finals, self.sizes.key_heads, positions)
        packs = "copy.pack.weight" in self.w
        packed = [self.w["copy.pack.weight"] @ v for v in embeds] if packs else embeds
        copied = self._attend(queries, keys, [np.split(v, self.sizes.key_heads) for v in packed], sees)
        if packs:
            copied = [self.w["copy.unpack.weight"] @ c for c in copied]
        gates = [sigmoid((self.w["copy.gate.weight"][0] @ f + self.w["copy.gate.bias"][0]).item()) for f in finals]
        return [g * self.w["copy.scale"][0] * c for g, c in zip(gates, copied, strict=True)]

    def _turned_heads(self, name: str, xs: list[Vector], heads: int, positions: Sequence[int]) -> list[list[Vector]]:
        """The heads of queries or keys of every position, normed and turned."""
        return [
            [
                rotated(self._norm(f"{name}_norm", head), position, self.sizes.theta)
                for head in np.split(self.w[f"{name}_proj.weight"] @ x, heads)
            ]
            for x, position in zip(xs, positions, strict=True)
        ]

    def _attend(
        self, queries: list[list[Vector]], keys: list[list[Vector]], values: list[list[Vector]], sees: Sees
    ) -> list[Vector]:
        """What each position takes from those it sees, its heads side by side."""
        heads, out = self.sizes.heads, []
        for i, query in enumerate(queries):
            seen = np.flatnonzero(sees[i])
            mixed = []
            for h, q in enumerate(query):
                of_key, of_value = (h * len(side[0]) // heads for side in (keys, values))
                scores = np.array([q @ keys[j][of_key] / math.sqrt(len(q)) for j in seen])
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                mixed.append(sum(s * values[j][of_value] for s, j in zip(shares, seen, strict=True)))
            out.append(np.concatenate(mixed))
        return out


def causal(length: int) -> Sees:
    return np.tril(np.ones((length, length), dtype=bool))


def sees_in_row(limit: Sequence[int], branch: Sequence[int], decode: Sequence[int]) -> Sees:
    """Who sees whom in a training row, told by these of each of its tokens.

    A token of the trunk (branch 0) sees the trunk up to itself. One of a branch sees the trunk before its limit, the
    spine of its branch (decode 0) up to itself, and of what hangs off the spine its own part (equal decode).
    """
    length = len(branch)
    out = np.zeros((length, length), dtype=bool)
    for i in range(length):
        for j in range(i + 1):
            if branch[j] == 0:
                out[i, j] = branch[i] == 0 or j < limit[i]
            else:
                out[i, j] = branch[j] == branch[i] and decode[j] in (0, decode[i])
    return out
