"""Load a checkpoint folder; anything that does not fit is a one-line InputError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from loopwm.records.errors import InputError, loading
from loopwm.records.template import SPECIAL_TOKENS
from loopwm.text.model.modeling import LoopWMForCausalLM


def load_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> tuple[LoopWMForCausalLM, PreTrainedTokenizerFast]:
    """Load model and tokenizer of a folder written by `save_pretrained`, onto the CPU by default.

    Raises InputError naming the file or key that does not fit.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InputError(f"{folder / name}: no such file")
    model = load_model(LoopWMForCausalLM, folder, dtype)
    with loading(folder):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if len(tokenizer) != model.config.vocab_size or not set(SPECIAL_TOKENS) <= tokenizer.get_vocab().keys():
        raise InputError(f"{folder / 'tokenizer.json'}: does not fit vocab_size {model.config.vocab_size}")
    return model.to(device or torch.device("cpu")), tokenizer


def load_model(model: Any, folder: Path, dtype: torch.dtype | str) -> Any:
    """Load a model of a transformers class from a folder that has exactly its weights. Raises InputError."""
    with loading(folder):
        loaded, info = model.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            raise InputError(f"{folder}: {problem.replace('_', ' ')}: {sorted(info[problem])[0]}")
    return loaded
