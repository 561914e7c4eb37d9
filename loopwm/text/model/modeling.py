"""The looped text world model in Hugging Face form.

    x     = RMSNorm(E[tokens])
    h     = LoopedCore(x)                                           prelude, looped block, coda
    f     = RMSNorm(h) + sigmoid(w . h + c) * s * copy(h)           copy: attention whose values are E[tokens]
    logits = E f                                                    tied embeddings

Every attention call of the deepest pass has a slot of its own, a weightless module with its own `layer_idx`, so
that caches and serving engines keep one set of keys and values for each. Departures from the LoopWM paper: the
copy attention (ours), and that the decoder may attend to everything before it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from loopwm.core.block import Attend, AttentionInputs, RMSNorm, causal_attention, prefix_attention, rotary_angles
from loopwm.core.depth import DepthPlan
from loopwm.core.exit_rules import ExitRule, as_rule
from loopwm.core.kv_cache import KVCache, RaggedBatch
from loopwm.core.looped import CoreOutput, LoopedCore
from loopwm.records.files import PACKAGED
from loopwm.runtime import attention_products
from loopwm.text.data.tree_attention import BranchMask, PackedMask, TreeMask, tree_attention
from loopwm.text.model.attention import AttentionSlot, CopyAttention, RewardAttention
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.heads import MonitorHead, PredictionHeads
from loopwm.text.model.propagation import Carried as Carried
from loopwm.text.model.propagation import Propagation

States = KVCache | RaggedBatch
"""Caches with ragged depth, which transformers' own cannot hold."""

RowMask = TreeMask | BranchMask | PackedMask
"""Attention masks of training rows."""

OBSERVATIONS_TOGETHER = {"cpu": 32, "cuda": 256}
"""Observations per batch through the prelude, by device."""


class LoopWMPreTrainedModel(PreTrainedModel):
    config: LoopWMConfig
    config_class = LoopWMConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]  # noqa: RUF012 - the base class declares it so
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as in transformers, with the file that `auto_map` names, readable by whoever may read the others."""
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        (folder / "auto.py").write_bytes((PACKAGED / "auto.py").read_bytes())
        for weights in folder.glob("*.safetensors"):  # which safetensors writes for their owner only
            shutil.copymode(folder / "config.json", weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(
            module, LoopedCore | CopyAttention | RewardAttention | PredictionHeads | MonitorHead | Propagation
        ):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


@dataclass
class LoopWMOutput(BaseModelOutputWithPast):
    """Output of a pass; fields not listed are those of `CoreOutput`.

    last_hidden_state: (B, L, D), input of the tied output embedding. latent: (B, L, D) h_k, the coda output,
    or (B, L, 2 D), with what reward attention returns behind it.
    """

    latent: Tensor | None = None
    state: Tensor | None = None
    previous_state: Tensor | None = None
    loops: Tensor | None = None


class LoopWMModel(LoopWMPreTrainedModel):
    def __init__(self, config: LoopWMConfig) -> None:
        if config._attn_implementation == "vllm":
            config.require_causal("vLLM")
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=None)
        self.embed_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if config.embed_norm else nn.Identity()
        self.core = LoopedCore(config.core)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.copy = CopyAttention(config) if config.copy_attention else None
        self.propagation = Propagation(config.hidden_size) if config.propagate == "latent" else None
        self.heads = PredictionHeads(config.hidden_size, config.reward_attention) if config.prediction_heads else None
        self.reward_attention = RewardAttention(config) if config.reward_attention else None
        self.monitor = MonitorHead(config.hidden_size) if config.monitor_head else None
        self.slots = nn.ModuleList(AttentionSlot(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | RowMask | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | States | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        depth: int | ExitRule | DepthPlan | None = None,
        exit_columns: int = 1,
        carried: Carried | None = None,
        **kwargs: Any,
    ) -> LoopWMOutput:
        """Run tokens (B, L) through the core.

        Args:
            input_ids: (B, L), or `inputs_embeds`.
            attention_mask: (B, S) for padding, (B, 1, L, S) bool for any other shape, a RaggedBatch's mask, or the
                RowMask of training rows, which bypasses the slots.
            position_ids: (B, L); None counts on from the cache.
            past_key_values: cache, changed in place.
            inputs_embeds: (B, L, D), in place of `input_ids`.
            use_cache: as in transformers.
            depth: number of loops, exit rule, or DepthPlan in training; None for `config.default_depth`.
            exit_columns: columns that an exit rule pools.
            carried: latents from the step before, with `propagate: latent`.
            kwargs: for the attention backend.

        Raises ValueError for a depth that the core rejects, or an exit rule with a cache of transformers, which cannot
        fill the loops that a row skips.
        """
        depth = self.config.default_depth if depth is None else depth  # `generate` and vLLM pass none
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if isinstance(past_key_values, Cache) and not isinstance(depth, int):
            raise ValueError("depth: must be a number of loops with a cache of transformers")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        shared, attend = self._attention(inputs_embeds, attention_mask, position_ids, past_key_values, **kwargs)
        # Tied embeddings start small (std D^-1/2); the norm brings x to unit scale for the prelude.
        x = self.embed_norm(inputs_embeds)
        initial = None
        if carried is not None and self.propagation is not None:
            x, initial = x + self.propagation(carried.latent.to(x.dtype)), carried.initial
        if isinstance(depth, DepthPlan):
            out = self.core.forward_sampled(x, shared, attend, depth, initial)
        else:
            out = self.core(x, shared, attend, depth, exit_columns, initial)
        final = self.norm(out.h)
        if self.copy is not None:
            final = final + self.copy(final, inputs_embeds, shared, attend, self.config.core.copy_slot)
        # Nothing to fill in training: stages of a row share its depth.
        if isinstance(past_key_values, States) and not isinstance(depth, DepthPlan):
            limit, columns = as_rule(depth).limit, inputs_embeds.shape[1]
            past_key_values.finish(self.config.core.loop_slots, out.loops, limit, columns)
        return LoopWMOutput(
            last_hidden_state=final,
            past_key_values=past_key_values,  # type: ignore[arg-type]  # a KVCache stands in for a Cache
            latent=self._latent(out, shared, attend),
            state=out.state,
            previous_state=out.previous_state,
            loops=out.loops,
        )

    def _latent(self, out: CoreOutput, shared: AttentionInputs, attend: Attend) -> Tensor:
        if self.reward_attention is None:
            return out.h
        context = self.reward_attention(out.h, out.state, shared, attend, self.config.reward_slot)
        return torch.cat([out.h, context], -1)

    def _attention(
        self,
        embeds: Tensor,
        mask: Tensor | RowMask | None,
        position_ids: Tensor | None,
        cache: Cache | States | None,
        **kwargs: Any,
    ) -> tuple[AttentionInputs, Attend]:
        """Return what all layers of a pass share, and their attention."""
        if isinstance(cache, RaggedBatch):
            assert position_ids is not None, "positions come from RaggedBatch.extend"
            attend = _apart(cache.attend(partial(self._slot_attention, **kwargs)))
            return AttentionInputs(*self._angles(position_ids), mask), attend
        if position_ids is None:
            position_ids = _positions(embeds, mask, cache)
        if isinstance(mask, RowMask):
            attend = _apart(_row_attention(cache))
        else:
            mask = self._causal_mask(embeds, mask, cache, position_ids)
            attend = self._slot_attention(cache, **kwargs)
            if isinstance(cache, KVCache):  # other caches are of libraries that compile the pass: no settings within it
                attend = _apart(attend)
        return AttentionInputs(*self._angles(position_ids), mask), attend

    def _angles(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(position_ids, self.config.head_dim, self.config.rope_theta, self.config.rope_frequencies)

    def _causal_mask(
        self, embeds: Tensor, attention_mask: Tensor | None, cache: Cache | KVCache | None, position_ids: Tensor
    ) -> Tensor | None:
        if attention_mask is not None and attention_mask.dim() == 4:
            return attention_mask
        if isinstance(cache, KVCache):
            return None  # the first columns of a state are plainly causal; later ones come with its mask
        return create_causal_mask(  # type: ignore[return-value]  # a BlockMask only with flex attention
            config=self.config,
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )

    @torch.no_grad()
    def embed_observations(self, tokens_NO: Tensor, length_N: Tensor) -> Tensor:
        """Embed each observation by itself: the unit mean of RMSNorm(prelude(o)) over its tokens, (N, D).

        No gradient flows (LoopWM, equation 20: e*_k = sg(E(o_k))).

        Args:
            tokens_NO: padded at the end to O.
            length_N: tokens of each; 0 gives zeros.
        """
        summary_ND = torch.zeros(len(tokens_NO), self.config.hidden_size, device=tokens_NO.device)
        # Most observations are short and few are long: one batch of all would be mostly padding.
        device = length_N.device.type
        # A GPU's kernels are compiled for one shape, and every batch here has another.
        with torch.compiler.set_stance("force_eager") if device == "cuda" else nullcontext():
            for rows in length_N.argsort().split(OBSERVATIONS_TOGETHER[device]) if len(length_N) else ():
                longest = int(length_N[rows[-1]])
                summary_ND[rows] = self._embed_observations(tokens_NO[rows, :longest], length_N[rows])
        return summary_ND

    def _embed_observations(self, tokens_NO: Tensor, length_N: Tensor) -> Tensor:
        positions = torch.arange(tokens_NO.shape[1], device=tokens_NO.device)[None]
        shared = AttentionInputs(*self._angles(positions))
        e_NOD = self.core.encode_input(self.embed_norm(self.embed_tokens(tokens_NO)), shared, causal_attention)
        real = positions < length_N[:, None]
        return F.normalize((e_NOD.float() * real[:, :, None]).sum(1), dim=-1)  # of length 1, so a sum does for the mean

    def _slot_attention(self, cache: Cache | KVCache | None, **kwargs: Any) -> Attend:
        def attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            if isinstance(cache, KVCache) and cache.prefix is not None:
                return prefix_attention(q, *cache.update(k, v, slot), mask, *cache.prefix.columns(slot))
            return self.slots[slot](q, k, v, mask, cache, **kwargs)

        return attend


def _apart(attention: Attend) -> Attend:
    """Wrap an attention so that it runs outside `quick_products`."""

    def attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        with attention_products(q.shape[2]):
            return attention(slot, q, k, v, mask)

    return attend


def _row_attention(cache: Cache | KVCache | None) -> Attend:
    """Return the attention of training rows. With a cache, columns also attend to those of earlier passes in it."""
    if not isinstance(cache, KVCache):
        return tree_attention

    def attend(slot: int, q: Tensor, k: Tensor, v: Tensor, mask: RowMask) -> Tensor:
        return tree_attention(slot, q, *cache.update(k, v, slot), mask)

    return attend


def _positions(embeds: Tensor, attention_mask: Tensor | RowMask | None, cache: Cache | KVCache | None) -> Tensor:
    """Return positions (B or 1, L) of new tokens, counted over real tokens under a padding mask (B, S)."""
    length = embeds.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]  # padding in front counts to -1
    past = cache.get_seq_length() if isinstance(cache, Cache) else 0  # positions of a KVCache come from `extend`
    return torch.arange(past, past + length, device=embeds.device)[None]


class LoopWMForCausalLM(LoopWMPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: LoopWMConfig) -> None:
        super().__init__(config)
        self.model = LoopWMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | KVCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        depth: int | ExitRule | DepthPlan | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, L or logits_to_keep, V) and, with labels (B, L), the mean next-token cross-entropy.

        Raises ValueError if the model is more than a causal language model (`require_causal`).
        """
        self.config.require_causal("a causal language model")
        out = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, depth, **kwargs
        )
        # A slice of -0 keeps all positions, transformers' meaning of 0.
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=out.past_key_values)


AutoConfig.register("loopwm", LoopWMConfig)
AutoModel.register(LoopWMConfig, LoopWMModel)
AutoModelForCausalLM.register(LoopWMConfig, LoopWMForCausalLM)
