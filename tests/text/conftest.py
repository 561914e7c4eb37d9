"""The tiny random model, as tests of this folder call it."""

from __future__ import annotations

import pytest

from loopwm.text.model.modeling import LoopWMForCausalLM


@pytest.fixture(scope="session")
def model(tiny_model: LoopWMForCausalLM) -> LoopWMForCausalLM:
    return tiny_model
