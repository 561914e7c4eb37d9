"""Imagined text worlds: encode a context, advance by actions, decode only on request (deferred decoding).

    world = model.encode(contexts)            h_0 at the state slots
    world = model.advance(world, actions)     h_{k+1}; nothing is decoded, the old world stays valid
    texts = model.decode(world)               the observation, from h_K
    model.predictions(world)                  reward and continuation of the last step, from h_K
    model.monitor(world)                      g_omega(h_K)
    world = model.observe(world, actions, observations)   real steps; equals encoding the longer history

A `World` is a batch: one row for each world. Every method takes and returns whole batches.

The depth of a pass is a number or an exit rule: a transition exits by one decision for each row and step, over its
state slots; decoding by one for each row and token. Contexts always run to the limit of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf, log
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from loopwm.core.exit_rules import ExitRule, Fixed
from loopwm.core.kv_cache import KVCache, RaggedBatch
from loopwm.records import template
from loopwm.records.template import Context, ContextTooLongError, FormatError, Transition
from loopwm.runtime import quick_products
from loopwm.text.decoding import DOUBTFUL, Decoded, Decoder, Hypothesis, MemoryText
from loopwm.text.drafts import Lookup, SharedText
from loopwm.text.memory import Memory
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import Predictions
from loopwm.text.model.modeling import Carried, LoopWMForCausalLM, States
from loopwm.text.model.tokenizer import special_ids
from loopwm.text.world_batch import World, by_length, by_prefix, joined, row_of, same_length, shareable


class _Pass(NamedTuple):
    """Final hidden states (B, L, D), latents as of `LoopWMOutput`, and each row's loops."""

    hidden: Tensor
    latent: Tensor
    loops: list[int]


def tokens_per_byte(tokenizer: PreTrainedTokenizerFast, goal: str, observation: str) -> float:
    """Return the ratio in the start of an episode, its goal and first observation."""
    texts = [template.clean(goal), template.clean(observation)]
    tokens = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    return tokens / max(1, len("".join(texts).encode()))


class WorldModel:
    """Language model and tokenizer with the interface of a world model."""

    def __init__(self, model: LoopWMForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.slots = model.config.slots
        self.state_slots = model.config.state_slots
        self._end, self._pad, self._obs = special_ids(tokenizer, (template.END, template.PAD, template.OBS))

    @classmethod
    def from_pretrained(cls, path: str | Path, device: torch.device | None = None) -> WorldModel:
        """Load a checkpoint folder in float32, on the CPU by default.

        Raises InputError in one line, if it does not fit.
        """
        return cls(*load_checkpoint(Path(path), device=device))

    @torch.inference_mode()
    def encode(self, contexts: Sequence[Context], depth: int | ExitRule | None = None) -> World:
        """Encode contexts to worlds at h_0.

        Args:
            contexts: at least one.
            depth: loops or exit rule of every pass; None for the checkpoint's default.

        Raises FormatError for no context, or a context whose head exceeds the limit by itself, and ValueError for a
        depth outside 1 .. max_loops, or a gate rule for a checkpoint without gate.
        """
        if not contexts:
            raise FormatError("contexts", "must be at least one, got none")
        core = self.model.model.core
        rule = core.check(self.model.config.default_depth if depth is None else depth)
        fitted = [self.fit(context) for context in contexts]
        history = KVCache(len(fitted), self.model.device)
        texts = [template.render_context(context, self.slots) for context, _ in fitted]
        self._feed(history, texts, Fixed(rule.limit))
        return self._at_slots(shareable(history), rule, tuple(dropped for _, dropped in fitted))

    # Parts of `encode` for engines that prefill in chunks and batches: fit, context_ids, slot_ids, start_world.

    def fit(self, context: Context) -> tuple[Context, int]:
        """Drop the oldest steps of a context until it fits; return it and their number.

        The head may be longer than `context_tokens`, up to the template's limit. Raises ContextTooLongError beyond.
        """
        limit, filled = (n - self.state_slots for n in (template.CONTEXT_LIMIT, self.model.config.context_tokens))
        return template.fit_context(context, self.count, limit, self.slots, filled)

    def context_ids(self, context: Context) -> tuple[int, ...]:
        """Return the tokens of a context that fits."""
        return tuple(self._ids(template.render_context(context, self.slots)))

    def action_ids(self, action: str) -> tuple[int, ...]:
        """Return the tokens of a step up to its observation."""
        return (*self._ids(template.render_step(action, self.slots)), self._obs)

    @cached_property
    def slot_ids(self) -> tuple[int, ...]:
        """Tokens to run after a context, in a fork of its state, for h_0."""
        return tuple(self._ids(self.slots.after_action))

    def start_world(self, history: KVCache, at_slots: tuple[KVCache, Tensor], depth: ExitRule) -> World:
        """Build the world h_0 of one row.

        Args:
            history: state after `context_ids`.
            at_slots: state after `slot_ids`, and the latent (M, D) there.
            depth: rule of every pass.
        """
        state, latent = at_slots
        state = history if self.slots.in_trunk else state
        return World(history, state, latent[None].clone(), depth, 0, (0,), ((),))

    @torch.inference_mode()
    def advance(self, world: World, actions: Sequence[str], depth: int | ExitRule | None = None) -> World:
        """Imagine one step for each row; nothing is decoded (LoopWM, equations 16 and 17). `world` stays valid.

        Args:
            world: batch of worlds.
            actions: one for each row.
            depth: of this step; None for the world's.

        Raises FormatError for an empty action or a wrong number of actions, and ValueError for a depth that `encode`
        rejects or above the world's limit.
        """
        same_length("actions", actions, world)
        rule = self._rule(world, depth).for_pass(world.steps, range(len(world)))
        state = world.state.fork()
        texts = [template.render_step(action, self.slots) for action in actions]
        out = self._feed(state, texts, rule, world.latent)
        return self._advanced(world, state, out, range(len(world)))

    @torch.inference_mode()
    def advance_each(self, worlds: Sequence[World], actions: Sequence[str]) -> list[World]:
        """Advance worlds of one row each and of one depth, with any histories, those with actions of a length together.

        Padding of shorter actions is removed again, so worlds stay as small as after `advance`.

        Raises ValueError for worlds of several depths, and FormatError as `advance`.
        """
        rules = {world.depth.for_pass(world.steps, range(1)) for world in worlds}
        if len(rules) != 1:
            raise ValueError("worlds: must be of one depth to advance together")
        (rule,), after = rules, dict[int, World]()
        for group in by_length([len(self.action_ids(action)) for action in actions]):
            advanced = self._advance_together([worlds[i] for i in group], [actions[i] for i in group], rule)
            after |= zip(group, advanced, strict=True)
        return [after[i] for i in range(len(worlds))]

    def _advance_together(self, worlds: Sequence[World], actions: Sequence[str], rule: ExitRule) -> list[World]:
        families = by_prefix([world.state for world in worlds])
        order = [i for family in families for i in family]
        states = [joined([worlds[i].state for i in family]) for family in families]
        texts = [template.render_step(actions[i], self.slots) for i in order]
        before = torch.cat([worlds[i].latent for i in order])
        out = self._feed(RaggedBatch(states), texts, rule, before)
        ends = {
            i: row_of(state, row)
            for family, state in zip(families, states, strict=True)
            for row, i in enumerate(family)
        }
        rows = {i: range(row, row + 1) for row, i in enumerate(order)}
        return [self._advanced(world, ends[i], out, rows[i]) for i, world in enumerate(worlds)]

    def _advanced(self, world: World, state: KVCache, out: _Pass, rows: range) -> World:
        """Build the world after a pass in which `rows` were its own; copies them, so that the pass can be freed."""
        latent = self._slots(out)[rows.start : rows.stop].clone()
        loops = tuple((*past, out.loops[row]) for past, row in zip(world.loops, rows, strict=True))
        return replace(world, state=state, latent=latent, steps=world.steps + 1, loops=loops)

    @torch.inference_mode()
    def observe(self, world: World, actions: Sequence[str], observations: Sequence[str]) -> World:
        """Append real steps (LoopWM, equation 3: h_k of h_{k-1}, o_k and a_k).

        Equals encoding the longer history as long as it fits the limit.

        Raises FormatError for imagined steps (observe from the world before them) or a wrong number of actions or
        observations, and ContextTooLongError where the limit is reached.
        """
        if world.steps:
            raise FormatError("world", f"must have no imagined steps, got {world.steps}; observe from the world before")
        same_length("actions", actions, world)
        same_length("observations", observations, world)
        steps = [Transition(action, text) for action, text in zip(actions, observations, strict=True)]
        history = world.history.fork()
        self._feed(history, [template.render_transition(step, self.slots) for step in steps], Fixed(world.depth.limit))
        longest = int(history.next_position.max()) + self.state_slots
        if longest > self.model.config.context_tokens:
            raise ContextTooLongError(
                "context", f"has {longest} tokens, the limit is {self.model.config.context_tokens}"
            )
        return self._at_slots(shareable(history), world.depth, world.steps_cut)

    def decode(
        self,
        world: World,
        max_new_tokens: int = template.LONGEST_OBSERVATION,
        depth: int | ExitRule | None = None,
        greedy: bool = False,
    ) -> list[str]:
        """Decode the observation of each row: the likelier of two texts (`loopwm.text.decoding`), or the greedy one.

        `world` stays as it is; `depth` as in `advance`. Raises ValueError for `max_new_tokens` below 1.
        """
        return [decoded.text for decoded in self.decode_traced(world, max_new_tokens, depth, greedy)]

    @torch.inference_mode()
    def decode_traced(
        self,
        world: World,
        max_new_tokens: int = template.LONGEST_OBSERVATION,
        depth: int | ExitRule | None = None,
        greedy: bool = False,
    ) -> list[Decoded]:
        """Decode as `decode`, with the loops of each token and the text's log-probability.

        With `decode_sees: state` the decoder attends to the newest slots only, which is D(h_K) (LoopWM, equation 18).
        After every step: LoopWM, equations 13 to 15.
        """
        state = self.before_decoding(world)
        lookups = [Lookup(SharedText(), "") for _ in range(len(world))]
        rule = self._rule(world, depth)
        return self._decode(lambda row: state.row(row).whole().share(1), lookups, max_new_tokens, rule, greedy)

    @torch.inference_mode()
    def decode_each(
        self,
        worlds: Sequence[World],
        lookups: Sequence[Lookup],
        max_new_tokens: int = template.LONGEST_OBSERVATION,
        greedy: bool = False,
        memory_texts: Sequence[MemoryText | None] = (),
    ) -> list[Decoded]:
        """Decode worlds of one row each and of one depth, with any histories, together.

        lookups: texts of each world up to its last action (`context_ids`, `action_ids`), extended by what is decoded.
        memory_texts: compete with the decoded text of each world, unless `greedy`.
        """
        if not worlds:
            return []
        return self._decode(
            lambda row: self.before_decoding(worlds[row]),
            lookups,
            max_new_tokens,
            worlds[0].depth,
            greedy,
            memory_texts,
        )

    @torch.inference_mode()
    def sample_each(
        self, worlds: Sequence[World], generator: torch.Generator, max_new_tokens: int = template.LONGEST_OBSERVATION
    ) -> list[str]:
        """Draw an observation of each world at temperature 1. worlds: as in `decode_each`, repeats allowed.

        The most probable token of logits with Gumbel noise is a draw from their distribution (Maddison et al., 2014).
        """

        def noisy(
            states: Sequence[KVCache], tokens: Sequence[Sequence[int]], step: int, rows: Sequence[int]
        ) -> tuple[Tensor, Sequence[int]]:
            logits, loops = self._next_tokens(worlds[0].depth, states, tokens, step, rows)
            noise = torch.empty_like(logits, dtype=torch.float32)
            return logits - noise.exponential_(generator=generator).log(), loops

        if not worlds:
            return []
        decoder = Decoder(noisy, self._obs, self._end, max_new_tokens, drafts=False)
        lookups = [Lookup(SharedText(), "") for _ in worlds]
        hypotheses = decoder.greedy([self.before_decoding(world) for world in worlds], lookups)
        return [decoded.text for decoded in self._texts(hypotheses)]

    def doubt(self, memory: Memory) -> float:
        """Return the log-probability below which a decoded observation gives way to one that was recalled.

        Any does if most episodes of the memory are worded unlike those that the checkpoint learned from: it is sure of
        itself there, too.
        """
        foreign = [self.is_foreign(*start) for start in memory.starts]
        return inf if 2 * sum(foreign) > len(foreign) else log(DOUBTFUL)

    def memory_text(self, text: str, doubt: float) -> MemoryText:
        """Return an observation that was recalled. doubt: as of `doubt`."""
        return MemoryText(tuple(self._ids(template.clean(text))), doubt)

    def _decode(
        self,
        fresh: Callable[[int], KVCache],
        lookups: Sequence[Lookup],
        max_new_tokens: int,
        rule: ExitRule,
        greedy: bool,
        memory_texts: Sequence[MemoryText | None] = (),
    ) -> list[Decoded]:
        """Decode each row. Where exits depend on single tokens, greedily and without drafts."""
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
        fixed = isinstance(rule, Fixed)
        decoder = Decoder(partial(self._next_tokens, rule), self._obs, self._end, max_new_tokens, drafts=fixed)
        if fixed and not greedy:
            return self._texts(decoder.likelier(fresh, lookups, memory_texts))
        return self._texts(decoder.greedy([fresh(row) for row in range(len(lookups))], lookups))

    def _texts(self, best: Sequence[Hypothesis]) -> list[Decoded]:
        texts = self.tokenizer.batch_decode([list(row.tokens) for row in best], skip_special_tokens=True)
        return [Decoded(text, row.loops, row.ended, row.log_probability) for text, row in zip(texts, best, strict=True)]

    def _next_tokens(
        self, rule: ExitRule, states: Sequence[KVCache], tokens: Sequence[Sequence[int]], step: int, rows: Sequence[int]
    ) -> tuple[Tensor, Sequence[int]]:
        longest = max(map(len, tokens))
        columns = torch.tensor([[*row, *[self._pad] * (longest - len(row))] for row in tokens])
        valid = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in tokens])
        device = self.model.device
        out = self._forward(RaggedBatch(states), columns.to(device), valid.to(device), rule.for_pass(step, rows))
        return self.model.lm_head(out.hidden), out.loops

    @torch.inference_mode()
    def predictions(self, world: World) -> Predictions:
        """Predict the reward of each row's last step and the probability that its world continues.

        Source: LoopWM, equation 18.

        Read from h_k; nothing is decoded. Raises ValueError if the checkpoint has no prediction heads.
        """
        heads = self.model.model.heads
        if heads is None:
            raise ValueError("prediction_heads: this checkpoint has none, so it predicts no reward and no continuation")
        return heads.predict(world.latent)

    @torch.inference_mode()
    def monitor(self, world: World) -> Tensor:
        """Return g_omega(h_k), a unit vector for each row, (B, D) (LoopWM, section 3.5.5).

        Trained to resemble the embedding of the observation at step k. Raises ValueError without a monitor head.
        """
        head = self.model.model.monitor
        if head is None:
            raise ValueError("monitor_head: this checkpoint has none")
        return head(world.latent[..., : self.model.config.hidden_size])

    def before_decoding(self, world: World) -> KVCache:
        """Return a writable state that the decoder attends to; `<|obs|>` comes next."""
        if self.model.config.decode_sees == "all":
            return world.state.fork()
        state = world.state.whole()
        columns = state.valid.shape[1]
        return state.crop(columns - self.state_slots, columns)

    def is_foreign(self, goal: str, observation: str) -> bool:
        """Return True if the start of an episode has more tokens per byte than that of any training episode.

        Words that the vocabulary has no tokens for fall into pieces. False if the checkpoint does not know the limit.
        """
        limit = self.model.config.tokens_per_byte
        return limit is not None and tokens_per_byte(self.tokenizer, goal, observation) > limit

    def count(self, text: str) -> int:
        return len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _rule(self, world: World, depth: int | ExitRule | None) -> ExitRule:
        if depth is None:
            return world.depth
        rule = self.model.model.core.check(depth)
        if rule.limit > world.depth.limit:
            raise ValueError(f"depth: must be at most {world.depth.limit} as encoded, got {rule.limit} loops")
        return rule

    def _at_slots(self, history: KVCache, depth: ExitRule, cut: tuple[int, ...]) -> World:
        """Run the slots of h_0 after a history, in a fork that is kept if later steps attend to them."""
        state = history.fork()
        out = self._feed(state, [self.slots.after_action] * len(cut), Fixed(depth.limit))
        state = history if self.slots.in_trunk else state
        return World(history, state, self._slots(out), depth, 0, cut, ((),) * len(cut))

    def _slots(self, out: _Pass) -> Tensor:
        """Return h_k (B, M, D) at the slots, which are the last columns."""
        return out.latent[:, -self.state_slots :]

    def _feed(self, state: States, texts: Sequence[str], depth: ExitRule, before: Tensor | None = None) -> _Pass:
        """Append one text to each row of `state`: the first padded at the end, later ones in front.

        The first then needs no mask, and later ones end in the same column. `before`: latents (B, M, D) of the step
        before, for the slots at the end of the texts.
        """
        ids = [self._ids(text) for text in texts]
        length = max(map(len, ids))
        tokens = torch.full((len(ids), length), self._pad)
        valid = torch.zeros(len(ids), length, dtype=torch.bool)
        for i, row in enumerate(ids):
            # Later texts end in one column, so that slots and exits are the last columns of every row.
            place = slice(length - len(row), None) if state.length else slice(len(row))
            tokens[i, place], valid[i, place] = torch.tensor(row), True
        carried = None
        if before is not None and self.model.config.propagate != "none":  # the slots are the last columns
            carried = Carried(F.pad(before, (0, 0, length - self.state_slots, 0)), None)
        return self._forward(state, tokens.to(self.model.device), valid.to(self.model.device), depth, carried)

    def _forward(
        self, state: States, tokens: Tensor, valid: Tensor, depth: ExitRule, carried: Carried | None = None
    ) -> _Pass:
        """Run (B, L) new tokens; exits are decided by the state slots, or by the last token if there are fewer."""
        positions, mask = state.extend(valid)
        # A decoded token is one column; a transition ends with the state slots.
        columns = min(tokens.shape[1], self.state_slots)
        with quick_products(tokens.numel()):
            out = self.model.model(
                tokens, mask, positions, past_key_values=state, depth=depth, exit_columns=columns, carried=carried
            )
        return _Pass(out.last_hidden_state, out.latent, out.loops.tolist())
