"""Fixtures shared by all rooms."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from loopwm.text.configuration import PRESETS, LoopWMConfig
from loopwm.text.modeling import LoopWMForCausalLM
from loopwm.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tokenizer: PreTrainedTokenizerFast) -> LoopWMForCausalLM:
    """A random `tiny` model whose layers all do something: a fresh one's output projections are zero.

    Tests must not change it.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LoopWMForCausalLM(LoopWMConfig(vocab_size=len(tokenizer), **PRESETS["tiny"])).eval()
        for name, weight in model.named_parameters():
            if "injection" not in name:
                weight.add_(0.3 * torch.randn_like(weight))
    return model
