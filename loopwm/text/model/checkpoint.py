"""Load a checkpoint folder; anything that does not fit is a one-line InputError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from loopwm.records.errors import InputError
from loopwm.records.template import SPECIAL_TOKENS
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM


def load_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> tuple[LoopWMForCausalLM, PreTrainedTokenizerFast]:
    """Load model and tokenizer of a folder written by `save_pretrained`.

    Args:
        folder: of the checkpoint.
        dtype: of the parameters.
        device: of the parameters, the CPU by default.

    Raises:
        InputError: naming the file or key that does not fit.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InputError(f"{folder / name}: no such file")
    try:
        config = LoopWMConfig.from_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        loaded: Any = LoopWMForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # the loaders raise many types for a damaged folder
        raise InputError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    model, info = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            raise InputError(f"{folder}: {problem.replace('_', ' ')}: {sorted(info[problem])[0]}")
    if len(tokenizer) != config.vocab_size or tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) != list(
        range(len(SPECIAL_TOKENS))
    ):
        raise InputError(f"{folder / 'tokenizer.json'}: does not fit vocab_size {config.vocab_size}")
    return model.to(device or torch.device("cpu")), tokenizer
