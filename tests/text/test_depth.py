"""Worlds whose steps and tokens leave the loop one by one."""

from __future__ import annotations

import pytest
import torch

from loopwm.core.exit_rules import Convergence, ExitRule, Fixed, Gate
from loopwm.records.template import Context, Transition
from loopwm.text.decoding import Decoded
from loopwm.text.world import World, WorldModel
from tests.fixtures.models import random_model
from tests.fixtures.trace import Trace

CONTEXTS = [
    Context("find a tree", "You are in a room."),
    Context("boil water", "This room is called the kitchen.", (Transition("open door", "It is open."),)),
    Context("go home", "A long and dark hall with 3 doors."),
    Context("measure", "The thermometer reads 10 degrees.", look="the kitchen", inventory="an orange"),
]
ACTIONS = [
    ["go to hall", "take tree", "drop it"],
    ["wait", "activate the sink", "look"],
    ["open door 1", "open door 2", "run"],
    ["read it", "heat it up", "eat the orange"],
]
LIMIT = 6


@pytest.fixture(scope="module")
def gated(tokenizer) -> WorldModel:
    """A random model whose gate leaves at many different depths."""
    model = random_model(exit_gate=True, state_slots=2)
    with torch.no_grad():
        gate = model.model.core.gate.linear
        gate.weight.copy_(torch.randn(64, generator=torch.Generator().manual_seed(1)) / 8)
        gate.bias.fill_(-4.0)
    return WorldModel(model, tokenizer)


def roll(model: WorldModel, rows: list[int], rule: ExitRule) -> tuple[World, list[Decoded]]:
    world = model.encode([CONTEXTS[i] for i in rows], rule)
    for k in range(3):
        world = model.advance(world, [ACTIONS[i][k] for i in rows])
    return world, model.decode_traced(world, 12)


@torch.inference_mode()
def first_logits(model: WorldModel, world: World) -> torch.Tensor:
    hidden = model._feed(world.state.fork(), ["<|obs|>"] * len(world), Fixed(LIMIT)).hidden
    return model.model.lm_head(hidden[:, -1])


@pytest.mark.parametrize("rule", [Gate(0.5, LIMIT), Convergence(0.28, LIMIT)])
def test_mixed_exits_in_a_batch_equal_the_same_worlds_alone(gated, rule):
    """Same loops of steps and tokens, same tokens, logits within 1e-4."""

    def roll(rows: list[int]) -> tuple[World, list[Decoded]]:
        world = gated.encode([CONTEXTS[i] for i in rows], rule)
        for k in range(3):
            world = gated.advance(world, [ACTIONS[i][k] for i in rows])
        return world, gated.decode_traced(world, 12)

    together, decoded = roll([0, 1, 2, 3])
    assert len({loops for row in together.loops for loops in row}) > 1
    assert len({loops for row in decoded for loops in row.loops}) > 1
    for row in range(4):
        alone, text = roll([row])
        assert alone.loops[0] == together.loops[row]
        assert text == [decoded[row]]
        torch.testing.assert_close(
            first_logits(gated, alone)[0], first_logits(gated, together)[row], atol=1e-4, rtol=1e-4
        )


def test_a_trace_replays_a_whole_rollout_bitwise(gated):
    world, decoded = roll(gated, [0, 1, 2, 3], Gate(0.5, LIMIT))
    again = gated.encode(CONTEXTS, LIMIT)
    for k in range(3):
        again = gated.advance(again, [row[k] for row in ACTIONS], Trace(world.loops))
    replayed = gated.decode_traced(again, 12, Trace(tuple(row.loops for row in decoded)))
    assert again.loops == world.loops
    assert replayed == decoded
    assert torch.equal(again.latent, world.latent)
    assert torch.equal(first_logits(gated, again), first_logits(gated, world))
    plain = gated.advance(gated.encode(CONTEXTS, LIMIT), [row[0] for row in ACTIONS])
    traced = gated.advance(gated.encode(CONTEXTS, LIMIT), [row[0] for row in ACTIONS], Trace(world.loops))
    assert not torch.equal(plain.latent, traced.latent)


def test_a_number_of_loops_is_the_fixed_rule_and_the_trace_of_it(gated):
    by_number, by_rule = (roll(gated, [0, 1], depth) for depth in (3, Fixed(3)))
    assert by_number[1] == by_rule[1]
    assert by_number[0].loops == ((3, 3, 3), (3, 3, 3))
    assert all(set(row.loops) == {3} for row in by_number[1])
    traced = gated.advance(gated.encode(CONTEXTS[:2], 3), [row[0] for row in ACTIONS[:2]], Trace(((3,), (3,))))
    plain = gated.advance(gated.encode(CONTEXTS[:2], 3), [row[0] for row in ACTIONS[:2]])
    assert torch.equal(traced.latent, plain.latent)


def test_every_token_has_its_loops_and_the_end_mark_too(gated):
    world, decoded = roll(gated, [0, 1, 2, 3], Gate(0.5, LIMIT))
    texts = gated.decode(world, 12)
    assert texts == [row.text for row in decoded]
    for row in decoded:
        tokens = len(gated.tokenizer(row.text, add_special_tokens=False)["input_ids"])
        assert len(row.loops) in (12, tokens + 1)


def test_selected_worlds_keep_their_own_loops(gated):
    world, _ = roll(gated, [0, 1, 2, 3], Gate(0.5, LIMIT))
    assert world.select([2, 0, 2]).loops == (world.loops[2], world.loops[0], world.loops[2])


def test_observing_runs_to_the_limit_and_starts_a_new_count(gated):
    world = gated.encode(CONTEXTS[:1], Gate(0.5, LIMIT))
    observed = gated.observe(world, ["wait"], ["Nothing happens."])
    longer = Context("find a tree", "You are in a room.", (Transition("wait", "Nothing happens."),))
    torch.testing.assert_close(observed.latent, gated.encode([longer], LIMIT).latent, atol=1e-4, rtol=1e-4)
    assert observed.loops == ((),)


def test_a_refused_depth_is_one_line_and_leaves_the_world_as_it_was(gated, world_model):
    world = gated.encode(CONTEXTS[:2], Gate(0.5, 4))
    before, columns = gated.decode(world, 4), world.state.valid.shape[1]
    for depth, named in (
        (5, "must be at most 4 as encoded, got 5 loops"),
        (0, "0 loops"),
        (99, "99 loops"),
        ("deep", "must be a number of loops or an exit rule"),
        (Trace(((2,),)), "loops: must have row 1, got a trace of 1 rows"),
    ):
        for call in (
            lambda depth=depth: gated.advance(world, ["a", "b"], depth),
            lambda depth=depth: gated.decode(world, 4, depth),
        ):
            with pytest.raises(ValueError, match=named) as error:
                call()
            assert "\n" not in str(error.value)
    assert gated.decode(world, 4) == before
    assert world.state.valid.shape[1] == columns
    with pytest.raises(ValueError, match="Gate needs an exit gate, which this model lacks"):
        world_model.encode(CONTEXTS[:1], Gate(0.5, 4))


def test_a_cache_that_cannot_fill_skipped_loops_takes_numbers_alone(gated):
    with pytest.raises(ValueError, match="with a cache of transformers"):
        gated.model(torch.tensor([[9, 10]]), use_cache=True, depth=Gate(0.5, 4))


def test_a_gate_changes_nothing_at_a_fixed_depth(gated):
    plain = random_model(state_slots=2)
    weights = {k: v for k, v in gated.model.state_dict().items() if "gate.linear" not in k}
    plain.load_state_dict(weights)
    tokens = torch.arange(10, 30)[None]
    with torch.no_grad():
        assert torch.equal(plain(tokens, depth=3).logits, gated.model(tokens, depth=3).logits)
