"""Imagined text worlds: encode what was seen, advance by actions, decode only where asked (deferred decoding).

    world = model.encode(contexts)            h_0 at the state slots
    world = model.advance(world, actions)     h_{k+1}; nothing is decoded, the old world stays valid
    texts = model.decode(world)               the observation, from h_K
    world = model.observe(world, actions, observations)   what really happened; equals encode of the longer history

A `World` is a batch: one row for each world. Every method takes and returns whole batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from loopwm.core import CoreState
from loopwm.text import format as template
from loopwm.text.checkpoint import load_checkpoint
from loopwm.text.format import Context, FormatError, Transition
from loopwm.text.modeling import LoopWMForCausalLM
from loopwm.text.tokenizer import special_ids


@dataclass(frozen=True)
class World:
    """A batch of worlds at the same number of imagined steps.

    history: keys and values of what was really seen, without state slots. state: these, the slots and the imagined
    steps. latent: (B, M, D) h_k at the newest slots. depth: loops of every pass. steps: imagined since the last real
    observation. steps_cut: old steps dropped from each row's context to fit the limit.
    """

    history: CoreState
    state: CoreState
    latent: Tensor
    depth: int
    steps: int
    steps_cut: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.latent)

    def select(self, rows: Sequence[int]) -> World:
        """The worlds of these rows; repeats make independent copies."""
        index = torch.tensor(rows, dtype=torch.long, device=self.latent.device)
        cut = tuple(self.steps_cut[i] for i in rows)
        state, latent = self.state.select(index), self.latent[index]
        return World(self.history.select(index), state, latent, self.depth, self.steps, cut)


class WorldModel:
    """A language model with its tokenizer, seen as a world model."""

    def __init__(self, model: LoopWMForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.state_slots = model.config.state_slots
        self._end, self._pad = special_ids(tokenizer, (template.END, template.PAD))

    @classmethod
    def from_pretrained(cls, path: str | Path) -> WorldModel:
        """Loads a checkpoint folder in float32. Raises CheckpointError (one line) if it does not fit."""
        return cls(*load_checkpoint(Path(path)))

    @torch.inference_mode()
    def encode(self, contexts: Sequence[Context], depth: int | None = None) -> World:
        """Worlds at h_0. `depth` None takes the checkpoint's default.

        Raises FormatError for an empty list or a context whose head alone exceeds the limit, ValueError for a depth
        outside 1 .. max_loops.
        """
        if not contexts:
            raise FormatError("contexts", "at least one context is needed")
        fitted = [template.fit_context(c, self._count, state_slots=self.state_slots) for c in contexts]
        depth = self.model.config.default_depth if depth is None else depth
        history = CoreState(len(fitted), self.model.device)
        self._feed(history, [template.render_context(context, state_slots=0) for context, _ in fitted], depth)
        return self._at_slots(history, depth, tuple(dropped for _, dropped in fitted))

    @torch.inference_mode()
    def advance(self, world: World, actions: Sequence[str]) -> World:
        """One imagined step: an action for each row goes in, nothing is decoded. `world` stays as it is.

        Raises FormatError for an empty action or a wrong number of them.
        """
        _same_length("actions", actions, world)
        state = world.state.fork()
        hidden = self._feed(state, [template.render_step(action, self.state_slots) for action in actions], world.depth)
        return World(world.history, state, self._slots(hidden), world.depth, world.steps + 1, world.steps_cut)

    @torch.inference_mode()
    def observe(self, world: World, actions: Sequence[str], observations: Sequence[str]) -> World:
        """What the environment really did. Equals encoding the longer history as long as that fits the limit.

        Raises FormatError for a world with imagined steps (observe from the world before them), for a wrong number of
        actions or observations, and when the context limit is reached.
        """
        if world.steps:
            raise FormatError("world", f"has {world.steps} imagined steps; observe from the world before them")
        _same_length("actions", actions, world)
        _same_length("observations", observations, world)
        steps = [Transition(action, text) for action, text in zip(actions, observations, strict=True)]
        history = world.history.fork()
        self._feed(history, [template.render_transition(step) for step in steps], world.depth)
        longest = int(history.next_position.max()) + self.state_slots
        if longest > template.CONTEXT_LIMIT:
            raise FormatError("context", f"has {longest} tokens, the limit is {template.CONTEXT_LIMIT}")
        return self._at_slots(history, world.depth, world.steps_cut)

    @torch.inference_mode()
    def decode(self, world: World, max_new_tokens: int = 256) -> list[str]:
        """The observation of each row, decoded greedily. `world` stays as it is."""
        out: list[list[int]] = [[] for _ in range(len(world))]
        rows, going = list(range(len(world))), set(range(len(world)))
        state = world.state.fork()
        hidden, _ = self._feed(state, [template.OBS] * len(rows), world.depth)
        for _ in range(max_new_tokens):
            tokens = self.model.lm_head(hidden[:, -1]).argmax(-1)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                if row in going and token != self._end:
                    out[row].append(token)
                else:
                    going.discard(row)
            if not going:
                break
            if 2 * len(going) <= len(rows):  # dropping rows copies the caches, so not for every one that ends
                index = torch.tensor([i for i, row in enumerate(rows) if row in going], device=tokens.device)
                rows, tokens, state = [rows[i] for i in index.tolist()], tokens[index], state.select(index)
            hidden, _ = self._forward(state, tokens[:, None], torch.ones_like(tokens[:, None]).bool(), world.depth)
        return self.tokenizer.batch_decode(out, skip_special_tokens=True)

    @torch.inference_mode()
    def nats(self, world: World, observations: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Teacher-forced loss: -log p of each row's observation with its `<|end|>`, and how many tokens that is.

        Both (B,), the first float32. `world` stays as it is.
        """
        _same_length("observations", observations, world)
        texts = [template.OBS + template.clean(text) + template.END for text in observations]
        hidden, _ = self._feed(world.state.fork(), texts, world.depth)
        losses, counts = [], []
        for row, text in zip(hidden, texts, strict=True):
            targets = torch.tensor(self._ids(text)[1:], device=row.device)
            logits = self.model.lm_head(row[-len(targets) - 1 : -1])
            losses.append(F.cross_entropy(logits.float(), targets, reduction="sum"))
            counts.append(len(targets))
        return torch.stack(losses), torch.tensor(counts, device=hidden.device)

    def rollout(
        self,
        contexts: Sequence[Context],
        actions: Sequence[Sequence[str]],
        horizons: Sequence[int] | None = None,
        depth: int | None = None,
    ) -> list[dict[int, str]]:
        """Encodes, injects each row's actions one after another and decodes at the asked horizons only.

        `horizons` None decodes the last step, which then needs rows of equally many actions. Returns for each row
        {horizon: observation}. Raises FormatError for rows with too few actions.
        """
        wanted = sorted(set(horizons)) if horizons is not None else [min((len(row) for row in actions), default=0)]
        if len(actions) != len(contexts) or not wanted or wanted[0] < 1:
            raise FormatError("actions", "each context needs at least one action, horizons count from 1")
        for i, row in enumerate(actions):
            if len(row) < wanted[-1] or (horizons is None and len(row) != wanted[-1]):
                raise FormatError(f"actions[{i}]", f"{len(row)} actions do not fit horizon {wanted[-1]}")
        world = self.encode(contexts, depth)
        out: list[dict[int, str]] = [{} for _ in contexts]
        for k in range(1, wanted[-1] + 1):
            world = self.advance(world, [row[k - 1] for row in actions])
            if k in wanted:
                for texts, text in zip(out, self.decode(world), strict=True):
                    texts[k] = text
        return out

    def _count(self, text: str) -> int:
        return len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _at_slots(self, history: CoreState, depth: int, cut: tuple[int, ...]) -> World:
        """The world of a history: its state slots run after it, in a fork."""
        state = history.fork()
        hidden = self._feed(state, [template.STATE * self.state_slots] * len(cut), depth)
        return World(history, state, self._slots(hidden), depth, 0, cut)

    def _slots(self, hidden: tuple[Tensor, Tensor]) -> Tensor:
        return hidden[1][:, -self.state_slots :]

    def _feed(self, state: CoreState, texts: Sequence[str], depth: int) -> tuple[Tensor, Tensor]:
        """Appends one text to each row of `state`: the first padded at the end, later ones in front.

        So the first needs no mask, and later ones end in the same column.
        """
        ids = [self._ids(text) for text in texts]
        length = max(map(len, ids))
        tokens = torch.full((len(ids), length), self._pad)
        valid = torch.zeros(len(ids), length, dtype=torch.bool)
        for i, row in enumerate(ids):
            place = slice(length - len(row), None) if state.valid.shape[1] else slice(len(row))
            tokens[i, place], valid[i, place] = torch.tensor(row), True
        return self._forward(state, tokens.to(self.model.device), valid.to(self.model.device), depth)

    def _forward(self, state: CoreState, tokens: Tensor, valid: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Runs (B, L) new tokens; returns final hidden states and latents h_k, both (B, L, D)."""
        positions, mask = state.extend(valid)
        out = self.model.model(tokens, mask, positions, past_key_values=state, depth=depth)
        return out.last_hidden_state, out.latent


def _same_length(name: str, values: Sequence[str], world: World) -> None:
    if len(values) != len(world):
        raise FormatError(name, f"{len(values)} given for {len(world)} worlds")
