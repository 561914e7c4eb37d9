"""Configuration of a text world model, and named sizes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from loopwm.core.looped import CoreConfig
from loopwm.records.template import CONTEXT_LIMIT, StateSlots

AUTO_MAP = {
    "AutoConfig": "auto.LoopWMConfig",
    "AutoModel": "auto.LoopWMModel",
    "AutoModelForCausalLM": "auto.LoopWMForCausalLM",
}
"""Classes that the Auto classes load from a checkpoint folder; `loopwm/pretrained/auto.py` is saved there."""

COLUMNS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("attention.o_proj", "mlp.down_proj")
"""Matrices of a layer whose outputs, or inputs, are split over GPUs: whole heads and parts of the MLP."""

RETIRED: dict[str, Any] = {"carry_state": False, "zoh": False}
"""Keys of earlier checkpoints whose switch was removed, with the value that still means the same model."""


@strict
class LoopWMConfig(PreTrainedConfig):
    r"""Configuration of a text world model.

    Args:
        prelude_layers, block_layers, coda_layers: layers before, inside (L_R) and after the loop.
        mu_rec: mean of the Poisson depth in training.
        num_key_value_heads: heads of keys and values, each shared by the same number of query heads; None: no sharing.
        max_loops: most loops of any pass; fixes the number of attention slots.
        default_depth: loops of a pass outside training if the caller names none.
        state_slots: M, `<|state|>` tokens that carry the latent of a world.
        slots_in_trunk: past steps carry state slots as imagined ones do (`StateSlots.in_trunk`). Off in checkpoints
            that were trained without.
        copy_attention: a last attention slot whose values are the input token embeddings (ours, not the paper's).
        input_norm, embed_norm: RMSNorm on e, the input of every loop, and on token embeddings. Off in adopted decoders.
        spectral_constraint: keep A_bar inside (0, 1). Off only in comparisons: A_bar is then a free diagonal.
        prediction_heads: predict reward and continuation from h_k.
        reward_attention: these two heads attend to all that was read, too; texts do not (ours, not the paper's).
        monitor_head: g_omega, a summary of h_k for monitoring, trained by the consistency loss.
        propagate: "latent" adds a projection of h_k to the input of the next step's slots.
        decode_sees: columns that a decoded token attends to: "all" before it, or the newest "state" slots and itself.
        state_norm: normalise the state at the end of every loop.
        sandwich_norms: normalise the outputs of attention and MLP of the looped layers before they are added.
        qk_norm, swiglu: layers normalise queries and keys; their MLP is a SwiGLU, squared ReLU otherwise.
        rope_frequencies: rotary frequency of each pair, where they are scaled; None: powers of `rope_theta`.
        exit_gate: a gate on the state that can end a pass early (`loopwm.core.exit_rules`).
        context_tokens: limit up to which a context is filled with history; older steps are dropped. Training rows are
            shorter than a context may be, and answers degrade beyond the trained length.
        tokens_per_byte: highest ratio in the goal and first observation of a training episode; None: unknown.
        num_hidden_layers: derived: the number of attention slots, so that every cache has one entry for each.
    """

    model_type = "loopwm"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - the base class declares it so
    depth_is_fixed: ClassVar[bool] = False
    """Every pass of this process has `default_depth` loops, so that there are slots for no more (`serve.vllm_plugin`).
    """

    base_model_tp_plan = {  # noqa: RUF012 - the base class declares it so
        **{f"core.{part}.*.{name}": "colwise" for part in ("prelude", "block", "coda") for name in COLUMNS},
        **{f"core.{part}.*.{name}": "rowwise" for part in ("prelude", "block", "coda") for name in ROWS},
        **dict.fromkeys(("copy.q_proj", "copy.k_proj", "copy.pack"), "colwise"),
        **{f"reward_attention.{name}_proj": "colwise" for name in "qkv"},
        **dict.fromkeys(("copy.unpack", "reward_attention.o_proj"), "rowwise"),
    }
    """Tensor parallelism of transformers and vLLM. It needs grouped keys and values, or no copy attention."""

    vocab_size: int = 4096
    hidden_size: int = 384
    num_attention_heads: int = 6
    num_key_value_heads: int | None = None
    head_dim: int = 64
    intermediate_size: int = 1536
    prelude_layers: int = 1
    block_layers: int = 3
    coda_layers: int = 1
    max_loops: int = 12
    mu_rec: float = 4.0
    default_depth: int = 4
    state_slots: int = 1
    slots_in_trunk: bool = True
    copy_attention: bool = True
    input_norm: bool = True
    embed_norm: bool = True
    spectral_constraint: bool = True
    prediction_heads: bool = False
    reward_attention: bool = False
    monitor_head: bool = False
    propagate: Literal["none", "latent"] = "none"
    decode_sees: Literal["all", "state"] = "all"
    exit_gate: bool = False
    state_norm: bool = False
    sandwich_norms: bool = False
    qk_norm: bool = True
    swiglu: bool = False
    rope_theta: float = 10000.0
    rope_frequencies: list[float] | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    context_tokens: int = CONTEXT_LIMIT
    tokens_per_byte: float | None = None
    num_hidden_layers: int = 0
    auto_map: dict[str, str] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self, **kwargs: Any) -> None:
        for name, default in RETIRED.items():
            if (value := kwargs.pop(name, default)) != default:
                raise ValueError(f"{name}: must be {default}, got {value!r}; this switch was removed")
        for name in ("prelude_layers", "block_layers", "coda_layers", "max_loops"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{name}: must be an integer of at least 0, got {getattr(self, name)!r}")
        self.auto_map = AUTO_MAP
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.num_hidden_layers = self.reward_slot + self.reward_attention  # one entry of a cache for each
        super().__post_init__(**kwargs)

    def update(self, config_dict: dict[str, Any]) -> None:
        """Change fields; the number of slots follows. vLLM's `--hf-overrides` does so before it allocates caches."""
        super().update(config_dict)
        self.num_hidden_layers = self.reward_slot + self.reward_attention

    def validate_architecture(self) -> None:
        """Validate the sizes; called by the strict base class. Raises ValueError naming the field."""
        if self.copy_attention and self.num_attention_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"hidden_size: must be num_attention_heads * head_dim = "
                f"{self.num_attention_heads} * {self.head_dim} with copy_attention, got {self.hidden_size}"
            )
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads: must divide num_attention_heads = {self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        if not 1 <= self.default_depth <= self.max_loops:
            raise ValueError(f"default_depth: must be 1 to max_loops = {self.max_loops}, got {self.default_depth}")
        if not 1 <= self.context_tokens <= CONTEXT_LIMIT:
            raise ValueError(f"context_tokens: must be 1 to {CONTEXT_LIMIT}, got {self.context_tokens}")
        sizes = (self.state_slots, self.block_layers, self.num_key_value_heads or 1, self.mu_rec)
        if min(sizes[:3]) < 1 or not self.mu_rec > 0:
            names = "state_slots, block_layers, num_key_value_heads, mu_rec"
            raise ValueError(f"{names}: must be at least 1, mu_rec above 0, got {', '.join(map(str, sizes))}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: must be even for rotary positions, got {self.head_dim}")
        if self.reward_attention and not (self.prediction_heads and self.propagate == "none"):
            raise ValueError("reward_attention: needs prediction_heads, which read it, and propagate: none")
        for name, value, known in (
            ("propagate", self.propagate, ("none", "latent")),
            ("decode_sees", self.decode_sees, ("all", "state")),
        ):
            if value not in known:
                raise ValueError(f"{name}: must be one of {', '.join(known)}, got {value!r}")

    def require_causal(self, user: str) -> None:
        """Raise ValueError if the model is not a plain causal language model, which `user` needs."""
        for name, value, needed in (("propagate", self.propagate, "none"), ("decode_sees", self.decode_sees, "all")):
            if value != needed:
                raise ValueError(f"{name}: must be {needed} for {user}, got {value}")

    @property
    def slots(self) -> StateSlots:
        return StateSlots(self.state_slots, self.slots_in_trunk)

    @property
    def trunk_is_served(self) -> bool:
        """True if a trunk step in training computes the same as a served prediction at horizon 1."""
        return self.slots_in_trunk and self.propagate == "none" and self.decode_sees == "all"

    @property
    def reward_slot(self) -> int:
        """Slot of reward attention, behind those of the core."""
        return self.core.num_slots

    @property
    def core(self) -> CoreConfig:
        same = {each.name: getattr(self, each.name) for each in fields(CoreConfig) if hasattr(self, each.name)}
        if self.depth_is_fixed:
            same["max_loops"] = self.default_depth
        return CoreConfig(
            dim=self.hidden_size,
            heads=self.num_attention_heads,
            mlp_dim=self.intermediate_size,
            norm_eps=self.rms_norm_eps,
            kv_heads=self.num_key_value_heads or self.num_attention_heads,
            **same,
        )


def _preset(dim: int, head_dim: int, layers: tuple[int, int, int], mu_rec: int) -> dict[str, int | float]:
    return {
        "hidden_size": dim,
        "num_attention_heads": dim // head_dim,
        "head_dim": head_dim,
        "intermediate_size": 4 * dim,
        "prelude_layers": layers[0],
        "block_layers": layers[1],
        "coda_layers": layers[2],
        "mu_rec": float(mu_rec),
        "default_depth": mu_rec,
        "max_loops": 3 * mu_rec,
    }


PRESETS: dict[str, dict[str, int | float]] = {
    "tiny": _preset(64, 32, (1, 1, 1), 2),
    "mini": _preset(256, 64, (1, 2, 1), 4),
    "reference": _preset(256, 64, (2, 4, 2), 2) | {"num_key_value_heads": 1, "mu_rec": 1.6},
    "small": _preset(384, 64, (1, 3, 1), 4),
    "base": _preset(512, 64, (2, 4, 2), 4),
    "large": _preset(1024, 64, (3, 6, 3), 6),
    "1b": _preset(2048, 128, (5, 10, 4), 8),
}
"""Keyword arguments of `LoopWMConfig` by name; the vocabulary and all other fields are up to the caller."""
