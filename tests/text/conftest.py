"""A tiny model with random weights, the zero-initialised ones too, and the frozen tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopwm.records.template import StateSlots
from loopwm.records.token_episode import TokenEpisode
from loopwm.text.data.tree import Branch, RowBuilder, TemplateIds
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer
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


OBSERVATIONS = ["You are in a room.", "The door is now open.", "You move to the hall.", "A 10 degrees cold hall."]
ACTIONS = ["", "open door", "go to hall", "look around"]


def token_episode(tokenizer, observations: list[str], actions: list[str]) -> TokenEpisode:
    """An episode with a look at every step; step k earns 10 k points, the last one ends it."""

    def ids(text: str):
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.uint16)

    steps = range(len(observations))
    looks = [ids(f"look {i}") for i in steps]
    return TokenEpisode.of_texts(
        ids("find a tree"),
        list(map(ids, observations)),
        list(map(ids, actions)),
        looks,
        looks,
        rewards=[10.0 * i for i in steps],
        dones=[i == len(steps) - 1 for i in steps],
        hidden_states=[ids(f"hidden {i}") for i in steps],
    )


@pytest.fixture(scope="session")
def episode(tokenizer) -> TokenEpisode:
    return token_episode(tokenizer, OBSERVATIONS, ACTIONS)


def every(step: int, horizons: int) -> Branch:
    """A branch of which every horizon is decoded."""
    return Branch(step, tuple(range(1, horizons + 1)))


def row_builder(tokenizer, slots: StateSlots) -> RowBuilder:
    names = ("goal", "hidden", "look", "inv", "obs", "act", "state", "end")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    return RowBuilder(TemplateIds(**ids), slots)


@pytest.fixture(scope="session")
def builder(tokenizer) -> RowBuilder:
    return row_builder(tokenizer, StateSlots())
