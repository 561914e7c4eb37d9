"""Imagined text worlds: encode what was seen, advance by actions, decode only where asked (deferred decoding).

    world = model.encode(contexts)            h_0 at the state slots
    world = model.advance(world, actions)     h_{k+1}; nothing is decoded, the old world stays valid
    texts = model.decode(world)               the observation, from h_K
    world = model.observe(world, actions, observations)   what really happened; equals encode of the longer history

A `World` is a batch: one row for each world. Every method takes and returns whole batches.

How deep a pass loops is a number or an exit rule: a transition leaves by one decision for each row and step, over its
state slots; decoding by one for each row and token. Contexts always run to the limit of the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from loopwm.core import CoreState, ExitRule, Fixed, Planes, new_state
from loopwm.text import format as template
from loopwm.text.checkpoint import load_checkpoint
from loopwm.text.format import Context, FormatError, Transition
from loopwm.text.modeling import LoopWMForCausalLM
from loopwm.text.tokenizer import special_ids


@dataclass(frozen=True)
class World:
    """A batch of worlds at the same number of imagined steps.

    history: keys and values of what was really seen, without state slots. state: these, the slots and the imagined
    steps. latent: (B, M, D) h_k at the newest slots. depth: the rule of every pass. steps: imagined since the last real
    observation. steps_cut: old steps dropped from each row's context to fit the limit. loops: what each row's imagined
    steps took.
    """

    history: CoreState
    state: CoreState
    latent: Tensor
    depth: ExitRule
    steps: int
    steps_cut: tuple[int, ...]
    loops: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.latent)

    def select(self, rows: Sequence[int]) -> World:
        """The worlds of these rows; repeats make independent copies."""
        index = torch.tensor(rows, dtype=torch.long, device=self.latent.device)
        cut = tuple(self.steps_cut[i] for i in rows)
        state, latent = self.state.select(index), self.latent[index]
        loops = tuple(self.loops[i] for i in rows)
        return World(self.history.select(index), state, latent, self.depth, self.steps, cut, loops)


@dataclass(frozen=True)
class Decoded:
    """A decoded observation, and the loops behind each of its tokens; that of the end mark comes last."""

    text: str
    loops: tuple[int, ...]


class _Pass(NamedTuple):
    """Final hidden states and latents h_k, both (B, L, D), and each row's loops."""

    hidden: Tensor
    latent: Tensor
    loops: list[int]


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
    def encode(
        self, contexts: Sequence[Context], depth: int | ExitRule | None = None, planes: Planes = Planes.PER_LOOP
    ) -> World:
        """Worlds at h_0. `depth` None takes the checkpoint's default. `planes`: what is kept of finished columns.

        Raises FormatError for an empty list or a context whose head alone exceeds the limit, ValueError for a depth
        outside 1 .. max_loops or a gate rule for a checkpoint without gate.
        """
        if not contexts:
            raise FormatError("contexts", "at least one context is needed")
        core = self.model.model.core
        rule = core.check(self.model.config.default_depth if depth is None else depth)
        fitted = [template.fit_context(c, self._count, state_slots=self.state_slots) for c in contexts]
        history = new_state(planes, len(fitted), self.model.device, core.config.loop_slots)
        texts = [template.render_context(context, state_slots=0) for context, _ in fitted]
        self._feed(history, texts, Fixed(rule.limit))
        return self._at_slots(history, rule, tuple(dropped for _, dropped in fitted))

    @torch.inference_mode()
    def advance(self, world: World, actions: Sequence[str], depth: int | ExitRule | None = None) -> World:
        """One imagined step: an action for each row goes in, nothing is decoded. `world` stays as it is.

        `depth`: of this step alone, None for the world's. Raises FormatError for an empty action or a wrong number of
        them, ValueError for a depth that `encode` refuses or that is above the world's limit.
        """
        _same_length("actions", actions, world)
        rule = self._rule(world, depth).for_pass(world.steps, range(len(world)))
        state = world.state.fork()
        out = self._feed(state, [template.render_step(action, self.state_slots) for action in actions], rule)
        loops = tuple((*row, new) for row, new in zip(world.loops, out.loops, strict=True))
        return World(world.history, state, self._slots(out), world.depth, world.steps + 1, world.steps_cut, loops)

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
        self._feed(history, [template.render_transition(step) for step in steps], Fixed(world.depth.limit))
        longest = int(history.next_position.max()) + self.state_slots
        if longest > template.CONTEXT_LIMIT:
            raise FormatError("context", f"has {longest} tokens, the limit is {template.CONTEXT_LIMIT}")
        return self._at_slots(history, world.depth, world.steps_cut)

    def decode(self, world: World, max_new_tokens: int = 256, depth: int | ExitRule | None = None) -> list[str]:
        """The observation of each row, decoded greedily. `world` stays as it is. `depth`: as in `advance`."""
        return [decoded.text for decoded in self.decode_traced(world, max_new_tokens, depth)]

    @torch.inference_mode()
    def decode_traced(
        self, world: World, max_new_tokens: int = 256, depth: int | ExitRule | None = None
    ) -> list[Decoded]:
        """As `decode`, with the loops that each token took."""
        rule = self._rule(world, depth)
        tokens_of: list[list[int]] = [[] for _ in range(len(world))]
        loops_of: list[list[int]] = [[] for _ in range(len(world))]
        rows, going = list(range(len(world))), set(range(len(world)))
        state = world.state.fork()
        out = self._feed(state, [template.OBS] * len(rows), rule.for_pass(0, rows))
        for step in range(1, max_new_tokens + 1):
            tokens = self.model.lm_head(out.hidden[:, -1]).argmax(-1)
            for row, token, loops in zip(rows, tokens.tolist(), out.loops, strict=True):
                if row in going:
                    loops_of[row].append(loops)
                if row in going and token != self._end:
                    tokens_of[row].append(token)
                else:
                    going.discard(row)
            if not going or step == max_new_tokens:
                break
            if 2 * len(going) <= len(rows):  # dropping rows copies the caches, so not for every one that ends
                index = torch.tensor([i for i, row in enumerate(rows) if row in going], device=tokens.device)
                rows, tokens, state = [rows[i] for i in index.tolist()], tokens[index], state.select(index)
            column = tokens[:, None]
            out = self._forward(state, column, torch.ones_like(column).bool(), rule.for_pass(step, rows))
        texts = self.tokenizer.batch_decode(tokens_of, skip_special_tokens=True)
        return [Decoded(text, tuple(loops)) for text, loops in zip(texts, loops_of, strict=True)]

    def rollout(
        self,
        contexts: Sequence[Context],
        actions: Sequence[Sequence[str]],
        horizons: Sequence[int] | None = None,
        depth: int | ExitRule | None = None,
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

    def _rule(self, world: World, depth: int | ExitRule | None) -> ExitRule:
        if depth is None:
            return world.depth
        rule = self.model.model.core.check(depth)
        if rule.limit > world.depth.limit:
            raise ValueError(f"depth: {rule.limit} loops, the world was encoded for at most {world.depth.limit}")
        return rule

    def _at_slots(self, history: CoreState, depth: ExitRule, cut: tuple[int, ...]) -> World:
        """The world of a history: its state slots run after it, in a fork."""
        state = history.fork()
        out = self._feed(state, [template.STATE * self.state_slots] * len(cut), Fixed(depth.limit))
        return World(history, state, self._slots(out), depth, 0, cut, ((),) * len(cut))

    def _slots(self, out: _Pass) -> Tensor:
        return out.latent[:, -self.state_slots :]

    def _feed(self, state: CoreState, texts: Sequence[str], depth: ExitRule) -> _Pass:
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

    def _forward(self, state: CoreState, tokens: Tensor, valid: Tensor, depth: ExitRule) -> _Pass:
        """Runs (B, L) new tokens, which leave the loop by what their state slots say, or by their last token."""
        positions, mask = state.extend(valid)
        columns = min(tokens.shape[1], self.state_slots)
        out = self.model.model(tokens, mask, positions, past_key_values=state, depth=depth, exit_columns=columns)
        return _Pass(out.last_hidden_state, out.latent, out.loops.tolist())


def _same_length(name: str, values: Sequence[str], world: World) -> None:
    if len(values) != len(world):
        raise FormatError(name, f"{len(values)} given for {len(world)} worlds")
