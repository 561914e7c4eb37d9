"""Convert a pretrained decoder (Qwen3, Llama) to a looped world model, to be trained on worlds.

Its first layers become the prelude, layers from its middle the looped block, its last layers the coda. A pass of one
loop computes the decoder of these layers alone: neither token embeddings nor e are normalised, dt is 1 and B and C are
the identity, so that the first loop runs on the prelude's output. Its tokenizer receives the marks of the template.

Source: McLeish et al. 2025 (retrofitted recurrence), with the injection of Parcae in place of their adapter.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from loopwm.core.injection import INITIAL_RETENTION
from loopwm.records.errors import InputError, loading
from loopwm.records.files import read_json
from loopwm.records.template import CONTEXT_LIMIT, END, PAD, SPECIAL_TOKENS
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.model.checkpoint import load_model
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import world_tokenizer
from loopwm.text.training.program import export_model

ARCHITECTURES = ("qwen3", "llama")
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that do not depend on the length of a text."""

NEEDED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""Values of a decoder's configuration that our layers can compute."""

SAME = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
"""Keys of both configurations."""

MODULES = {
    "input_layernorm": "attention_norm", "self_attn": "attention", "post_attention_layernorm": "mlp_norm", "mlp": "mlp"
}  # fmt: skip
"""Our modules of a layer by theirs."""

SAMPLE = "On the desk 1, you see:\n\n\ta mug 12 (25 °C)."


def adopt(source: Path, out: Path, prelude: int, block: int, coda: int) -> None:
    """Write a checkpoint with the first `prelude`, the middle `block` and the last `coda` layers of a decoder.

    Raises InputError for a decoder that our layers cannot compute; nothing is written then.
    """
    if out.exists():
        raise InputError(f"--out: {out}: exists already")
    layers = chosen_layers(read_config(source).num_hidden_layers, prelude, block, coda)
    tokenizer, words = marked_tokenizer(source / "tokenizer.json")
    decoder = load_model(AutoModelForCausalLM, source, "auto")
    model = LoopWMForCausalLM(looped_config(decoder, tokenizer, (prelude, block, coda)))
    places = [
        f"{part}.{i}" for part in ("prelude", "block", "coda") for i in range(len(getattr(model.model.core, part)))
    ]
    weights = _weights(decoder, dict(zip(layers, places, strict=True)))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = with_marks(decoder.state_dict()[name], len(tokenizer), words)
    # Injection, C and heads keep their initial values; every weight of the decoder has its place.
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    injection = model.model.core.injection
    torch.nn.init.constant_(injection.b, math.log(math.expm1(1.0)))  # dt = softplus(b) = 1
    torch.nn.init.constant_(injection.a, math.log(-math.log(INITIAL_RETENTION)))
    out.parent.mkdir(parents=True, exist_ok=True)
    export_model(model, tokenizer, out, TrainingEpisodes({}), decoder.dtype)
    print(f"{out}: layers {', '.join(map(str, layers))} of {source}, {model.num_parameters() / 1e6:.1f}M parameters")


def read_config(source: Path) -> Any:
    """Read a decoder's configuration. Raises InputError if our layers cannot compute it."""
    file = source / "config.json"
    if (kind := read_json(file).get("model_type")) not in ARCHITECTURES:
        raise InputError(f"{file}: model_type: must be {' or '.join(ARCHITECTURES)}, got {kind!r}")
    with loading(file):
        config = AutoConfig.from_pretrained(source)
    for name, needed in NEEDED.items():
        if (value := getattr(config, name, needed)) != needed:
            raise InputError(f"{file}: {name}: must be {needed}, got {value!r}")
    if (rope := config.rope_parameters["rope_type"]) not in ROPES:
        raise InputError(f"{file}: rope_type: must be one of {', '.join(ROPES)}, got {rope!r}")
    return config


def chosen_layers(count: int, prelude: int, block: int, coda: int) -> list[int]:
    """Return the numbers of the layers to take, of `count`. Raises InputError."""
    if min(prelude, coda) < 0 or block < 1:
        raise InputError(f"--prelude, --block, --coda: must be at least 0, 1, 0, got {prelude}, {block}, {coda}")
    if (skipped := count - prelude - block - coda) < 0:
        raise InputError(
            f"--prelude, --block, --coda: must be {count} layers at most, got {prelude} + {block} + {coda}"
        )
    middle = prelude + skipped // 2
    return [*range(prelude), *range(middle, middle + block), *range(count - coda, count)]


def marked_tokenizer(file: Path) -> tuple[PreTrainedTokenizerFast, dict[int, list[int]]]:
    """Add the marks to a tokenizer; return it, and the tokens of the word in each new mark, by its id.

    Raises InputError for a file that is missing, damaged or not byte-level.
    """
    with loading(file):
        backend = Tokenizer.from_file(str(file))
    new = [mark for mark in SPECIAL_TOKENS if backend.token_to_id(mark) is None]
    words = [backend.encode(mark.strip("<|>"), add_special_tokens=False).ids for mark in new]
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in new])
    # Without their mark for the start of a text, which the template does not have.
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if backend.decode(backend.encode(SAMPLE).ids) != SAMPLE:
        raise InputError(f"{file}: must be a byte-level tokenizer")
    tokenizer = world_tokenizer(backend)
    return tokenizer, {tokenizer.get_vocab()[mark]: ids for mark, ids in zip(new, words, strict=True)}


def looped_config(decoder: Any, tokenizer: PreTrainedTokenizerFast, layers: tuple[int, int, int]) -> LoopWMConfig:
    """Return the configuration of a model of `layers` layers before, inside and after the loop."""
    config, rotary, ids = decoder.config, decoder.model.rotary_emb, tokenizer.get_vocab()
    return LoopWMConfig(
        **{name: getattr(config, name) for name in SAME},
        vocab_size=len(tokenizer),
        prelude_layers=layers[0],
        block_layers=layers[1],
        coda_layers=layers[2],
        mu_rec=1.0,
        default_depth=1,
        copy_attention=False,
        input_norm=False,
        embed_norm=False,
        prediction_heads=True,
        qk_norm=config.model_type == "qwen3",
        swiglu=True,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        rope_frequencies=None if rotary.rope_type == "default" else rotary.inv_freq.tolist(),
        context_tokens=min(CONTEXT_LIMIT, config.max_position_embeddings),
        pad_token_id=ids[PAD],
        eos_token_id=ids[END],
    )


def _weights(decoder: Any, places: dict[int, str]) -> dict[str, Tensor]:
    """Return the weights of layers by our names. places: our name of each layer that is taken."""
    theirs = decoder.state_dict()
    weights = {"model.norm.weight": theirs["model.norm.weight"]}
    for layer, place in places.items():
        for name, weight in decoder.model.layers[layer].state_dict().items():
            module, rest = name.split(".", 1)
            weights[f"model.core.{place}.{MODULES[module]}.{rest}"] = weight
    # YaRN multiplies both cos and sin, which scales queries and keys.
    kind = "norm" if decoder.config.model_type == "qwen3" else "proj"
    scaled = (f"q_{kind}.weight", f"k_{kind}.weight")
    factor = decoder.model.rotary_emb.attention_scaling
    return {name: weight * factor if name.endswith(scaled) else weight for name, weight in weights.items()}


def with_marks(table_VD: Tensor, count: int, words: dict[int, list[int]]) -> Tensor:
    """Return the rows of `count` tokens; a mark starts as the mean of the tokens of its word.

    Raises InputError for a token without a row. words: as `marked_tokenizer` returns them.
    """
    if count - len(words) > len(table_VD):
        raise InputError(f"tokenizer.json: must have at most {len(table_VD)} tokens, got {count - len(words)}")
    rows = table_VD.new_empty(count, table_VD.shape[1])
    rows[: len(table_VD)] = table_VD[:count]
    for mark, ids in words.items():
        rows[mark] = table_VD[ids].float().mean(0)
    return rows


if __name__ == "__main__":
    from loopwm.text.adopt_command import main

    sys.exit(main())
