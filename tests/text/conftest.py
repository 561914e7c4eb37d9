"""A tiny model with random weights, the zero-initialised ones too, and the frozen tokenizer."""

from __future__ import annotations

import pytest
import torch

from loopwm.text.configuration import PRESETS, LoopWMConfig
from loopwm.text.modeling import LoopWMForCausalLM
from loopwm.text.tokenizer import load_tokenizer
from loopwm.text.world import WorldModel


def random_model(**overrides) -> LoopWMForCausalLM:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LoopWMForCausalLM(LoopWMConfig(vocab_size=len(load_tokenizer()), **{**PRESETS["tiny"], **overrides}))
        for name, parameter in model.named_parameters():
            if "injection" not in name:
                parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="session")
def model() -> LoopWMForCausalLM:
    return random_model()


@pytest.fixture(scope="session")
def world_model(model, tokenizer) -> WorldModel:
    return WorldModel(model, tokenizer)
