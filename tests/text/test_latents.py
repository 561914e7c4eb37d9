"""Worlds and their latents: decoding from the slots, predictions, monitoring, ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopwm.records.template import Context
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMModel
from loopwm.text.world import World, WorldModel
from tests.fixtures.models import random_model

CONTEXTS = [Context("find 3 trees", "You see 5 doors."), Context("find 8 trees", "You see 9 doors.")]
EVERYTHING = {
    "prediction_heads": True,
    "monitor_head": True,
    "propagate": "latent",
    "state_slots": 2,
}


def imagined(world_model: WorldModel) -> World:
    """Two worlds of equally many tokens after one action, so that their columns can be exchanged."""
    world = world_model.advance(world_model.encode(CONTEXTS, depth=3), ["open door", "close door"])
    assert world.state.next_position.unique().numel() == 1
    return world


def with_columns(world: World, columns: slice, change) -> World:
    """The world with `change` applied to the keys and values of some columns, (B, H, n, E) each."""
    state = world.state.select(torch.arange(len(world)))
    for side in (side for slot in state._lengths for side in state.columns(slot)):
        side[:, :, columns] = change(side[:, :, columns].clone())
    return replace(world, state=state)


def talkative(tokenizer, **overrides) -> WorldModel:
    """A random model whose decoder never ends: the end token and the other marks can not win."""
    model = random_model(state_slots=2, **overrides)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.lm_head.weight[:9] = 0
    return WorldModel(model, tokenizer)


@pytest.fixture(scope="module")
def from_state(tokenizer) -> WorldModel:
    return talkative(tokenizer, decode_sees="state")


def test_what_is_decoded_from_the_state_follows_the_slots_when_two_worlds_exchange_them(from_state):
    world = imagined(from_state)
    first, second = from_state.decode(world, 12)
    assert first != second
    swapped = with_columns(world, slice(-2, None), lambda x: x.flip(0))
    assert from_state.decode(swapped, 12) == [second, first]
    zeroed = with_columns(world, slice(-2, None), torch.zeros_like)
    assert from_state.decode(zeroed, 12) != [first, second]


def test_history_alone_does_not_change_what_is_decoded_from_the_state(from_state, tokenizer):
    world = imagined(from_state)
    changed = with_columns(world, slice(None, -2), lambda x: x.flip(0))
    assert from_state.decode(changed, 12) == from_state.decode(world, 12)
    seeing_all = talkative(tokenizer)
    world = imagined(seeing_all)
    changed = with_columns(world, slice(None, -2), lambda x: x.flip(0))
    assert seeing_all.decode(changed, 12) != seeing_all.decode(world, 12)


@pytest.fixture(scope="module")
def equipped(tokenizer) -> WorldModel:
    return WorldModel(random_model(**EVERYTHING), tokenizer)


def test_predictions_and_summaries_belong_to_each_row_alone(equipped):
    world = imagined(equipped)
    together, summary = equipped.predictions(world), equipped.monitor(world)
    assert summary.shape == (2, equipped.model.config.hidden_size)
    torch.testing.assert_close(summary.norm(dim=-1), torch.ones(2))
    assert ((together.continuation > 0) & (together.continuation < 1)).all()
    assert (together.expected_reward[0] - together.expected_reward[1]).abs() > 1e-4
    alone = equipped.predictions(world.select([1]))
    torch.testing.assert_close(alone.expected_reward[0], together.expected_reward[1], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(alone.continuation[0], together.continuation[1], atol=1e-5, rtol=1e-4)


def test_a_checkpoint_without_heads_says_so(world_model):
    world = world_model.encode(CONTEXTS[:1])
    with pytest.raises(ValueError, match="prediction_heads"):
        world_model.predictions(world)
    with pytest.raises(ValueError, match="monitor_head"):
        world_model.monitor(world)


@pytest.mark.parametrize("overrides", [{"propagate": "latent"}, {"decode_sees": "state"}], ids=str)
def test_a_model_that_is_more_than_a_language_model_refuses_to_be_run_as_one(overrides):
    model = random_model(**overrides)
    with pytest.raises(ValueError, match=next(iter(overrides))) as error:
        model(torch.tensor([[2, 9, 10]]))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=next(iter(overrides))):
        model.generate(torch.tensor([[2, 9, 10]]), max_new_tokens=2)


@pytest.mark.parametrize("overrides", [{"propagate": "latent"}, {"decode_sees": "state"}], ids=str)
def test_vllm_which_builds_the_base_model_is_refused_in_one_line(overrides):
    config = LoopWMConfig(vocab_size=64, **PRESETS["tiny"], **overrides)
    config._attn_implementation = "vllm"  # what vLLM sets before it builds the model
    with pytest.raises(ValueError, match="vLLM") as error:
        LoopWMModel(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"propagate": "text"}, {"decode_sees": "slots"}], ids=str)
def test_unknown_switches_are_refused_by_name(wrong):
    with pytest.raises(Exception, match=next(iter(wrong))):
        LoopWMConfig(**PRESETS["tiny"], **wrong)
