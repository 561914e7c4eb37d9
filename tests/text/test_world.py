from __future__ import annotations

from random import Random

import pytest
import torch

from loopwm.records import template as template
from loopwm.records.template import Context, FormatError, Transition
from loopwm.text.world import WorldModel
from loopwm.text.world_batch import PASS_TOKENS, by_length
from tests.fixtures.models import random_model

SHORT = Context("find a tree", "You are in a room.")
LONG = Context(
    "boil 12 cups of water",
    "This room is called the kitchen.",
    (Transition("open door", "The door is now open."), Transition("look", "A sink, which is turned off.")),
    "the kitchen",
    "an orange",
)
ACTIONS = [["go to hall", "take the tree", "drop it"], ["wait", "activate sink", "look around"]]


def greedy(model, tokenizer, prompt: str, depth: int, tokens: int) -> str:
    """The prompt continued without any cache."""
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat((ids, model(ids, depth=depth).logits[:, -1:].argmax(-1)), dim=1)
            if ids[0, -1].item() == tokenizer.eos_token_id:
                break
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_cached_batched_deferred_decoding_equals_uncached_single_prompts(world_model, model, tokenizer):
    world = world_model.encode([SHORT, LONG], depth=3)
    for k in (1, 2, 3):
        world = world_model.advance(world, [row[k - 1] for row in ACTIONS])
        texts = world_model.decode(world, max_new_tokens=10)
        for context, actions, text in zip((SHORT, LONG), ACTIONS, texts, strict=True):
            prompt = template.render_prompt(context, actions[:k])
            assert text == greedy(model, tokenizer, prompt, 3, 10)


def test_generate_continues_a_prompt_like_decode(world_model, model, tokenizer):
    prompts = [template.render_prompt(c, a) for c, a in zip((SHORT, LONG), ACTIONS, strict=True)]
    batch = tokenizer(prompts, add_special_tokens=False, return_tensors="pt", padding=True, padding_side="left")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    out = model.generate(**inputs, max_new_tokens=10, do_sample=False, depth=4)
    generated = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    world = world_model.encode([SHORT, LONG], depth=4)
    for step in zip(*ACTIONS, strict=True):
        world = world_model.advance(world, list(step))
    assert generated == world_model.decode(world, max_new_tokens=10)


def test_depth_changes_what_is_decoded(world_model):
    """Otherwise none of the comparisons at one depth would show that loops are cached apart."""
    latents = [world_model.encode([LONG], depth).latent for depth in (1, 2, 5)]
    assert (latents[0] - latents[1]).abs().max() > 1e-2
    assert (latents[1] - latents[2]).abs().max() > 1e-2


def test_observe_equals_encode_of_the_longer_history(world_model):
    observations = ["You see a tree.", "The water is 9 degrees."]
    steps = [Transition(a[0], o) for a, o in zip(ACTIONS, observations, strict=True)]
    observed = world_model.observe(world_model.encode([SHORT, LONG]), [s.action for s in steps], observations)
    longer = [
        Context(c.goal, c.observation, (*c.history, s), c.look, c.inventory)
        for c, s in zip((SHORT, LONG), steps, strict=True)
    ]
    encoded = world_model.encode(longer)
    torch.testing.assert_close(observed.latent, encoded.latent, atol=1e-4, rtol=1e-4)
    assert world_model.decode(observed, 8) == world_model.decode(encoded, 8)
    again = world_model.observe(observed, ["x", "y"], ["z", "w 1"])
    twice = [Context(c.goal, c.observation, (*c.history, Transition(a, o)), c.look, c.inventory)
             for c, a, o in zip(longer, "xy", ("z", "w 1"), strict=True)]  # fmt: skip
    torch.testing.assert_close(again.latent, world_model.encode(twice).latent, atol=1e-4, rtol=1e-4)


def test_advance_and_decode_leave_the_old_world_as_it_was(world_model):
    world = world_model.encode([SHORT])
    before = world_model.decode(world, 8)
    later = world_model.advance(world, ["go north"])
    world_model.decode(later, 8)
    world_model.advance(later, ["go south"])
    assert world_model.decode(world, 8) == before
    assert (world.steps, later.steps) == (0, 1)


def test_a_selected_branch_equals_the_same_actions_alone(world_model):
    world = world_model.encode([SHORT, LONG])
    forks = world_model.advance(world.select([1, 1, 0]), ["wait", "jump", "wait"])
    for row, (context, action) in enumerate([(LONG, "wait"), (LONG, "jump"), (SHORT, "wait")]):
        alone = world_model.advance(world_model.encode([context]), [action])
        torch.testing.assert_close(forks.latent[row], alone.latent[0], atol=1e-4, rtol=1e-4)


def test_wordings_beyond_the_limit_are_foreign(world_model, monkeypatch):
    goal, seen = "Your task is to melt lead.", "This room is called the hallway. In it, you see: the agent"
    ratio = (world_model.count(goal) + world_model.count(seen)) / len((goal + seen).encode())
    for limit, foreign in ((None, False), (ratio, False), (ratio - 1e-6, True)):
        monkeypatch.setattr(world_model.model.config, "tokens_per_byte", limit)
        assert world_model.is_foreign(goal, seen) is foreign


def test_long_histories_are_cut_and_reported(world_model):
    steps = tuple(Transition("go to the next room", "You move to the next room. " * 5) for _ in range(90))
    world = world_model.encode([Context("g", "o", steps), SHORT])
    assert world.steps_cut[0] > 0
    assert world.steps_cut[1] == 0
    assert int(world.state.next_position.max()) <= template.CONTEXT_LIMIT
    with pytest.raises(FormatError, match="limit is 2048"):
        world_model.observe(world, ["a", "b"], ["long " * 40, "short"])


def test_history_fills_what_the_model_was_trained_on_and_a_head_may_be_longer(tokenizer):
    """By observing too: what no longer fits is refused there, for who can encode it anew."""
    short = WorldModel(random_model(context_tokens=60), tokenizer)
    steps = tuple(Transition("go on", f"You move to room {i}.") for i in range(20))
    world = short.encode([Context("g", "o", steps)])
    kept = steps[world.steps_cut[0] :]
    assert 2 <= len(kept) < 20
    torch.testing.assert_close(world.latent, short.encode([Context("g", "o", kept)]).latent)
    assert short.count(template.render_context(Context("g", "o", steps[-len(kept) - 1 :]), short.slots)) > 60 - 1
    with pytest.raises(FormatError, match="limit is 60"):
        short.observe(world, ["go on"], ["You move to room 20."])
    assert short.encode([Context("g" * 200, "o", steps[:2])]).steps_cut == (1,), "the newest step stays"


def test_bad_calls_name_the_argument(world_model):
    world = world_model.encode([SHORT])
    cases = [
        (lambda: world_model.encode([]), "contexts"),
        (lambda: world_model.advance(world, []), "actions"),
        (lambda: world_model.advance(world, [""]), "action"),
        (lambda: world_model.observe(world_model.advance(world, ["a"]), ["a"], ["o"]), "world"),
        (lambda: world_model.observe(world, ["a"], []), "observations"),
    ]
    for call, field in cases:
        with pytest.raises(FormatError) as error:
            call()
        assert error.value.field == field
    with pytest.raises(ValueError, match="max_loops"):
        world_model.encode([SHORT], depth=99)


def test_copies_of_a_world_that_was_encoded_alone_keep_its_history_once(world_model):
    context, action = Context("warm the water", "a kitchen with a stove and a pot"), "look around"
    alone = world_model.advance(world_model.encode([context]), [action])
    batch = world_model.advance(world_model.encode([Context("go", "a hall"), context]), ["wait", action])
    actions = ["go to the kitchen", "wait", "pick up the metal pot"]
    shared, copies = alone.select([0, 0, 0]), batch.select([1, 1, 1])
    assert shared.state.nbytes() < copies.state.nbytes() / 2
    assert shared.history.nbytes() == alone.history.nbytes()
    for _ in range(2):
        shared, copies = (world_model.advance(world, actions) for world in (shared, copies))
        torch.testing.assert_close(shared.latent, copies.latent, atol=1e-4, rtol=1e-4)
    assert world_model.decode(shared, 20) == world_model.decode(copies, 20)
    assert world_model.decode(shared.select([2, 0]), 20) == world_model.decode(copies.select([2, 0]), 20)


def test_copies_can_be_observed_like_the_world_they_came_from(world_model):
    context = Context("warm the water", "a kitchen with a stove")
    copies, actions, seen = world_model.encode([context]).select([0, 0]), ["look", "wait"], ["a pot", "nothing happens"]
    observed = world_model.observe(copies, actions, seen)
    expected = world_model.observe(world_model.encode([context, context]), actions, seen)
    torch.testing.assert_close(observed.latent, expected.latent, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(50))
def test_worlds_with_actions_of_similar_length_step_together(seed):
    rng = Random(seed)
    lengths = [rng.randint(1, rng.choice((8, 40))) for _ in range(rng.choice((0, 1, 2, 10, 60)))]
    groups = by_length(lengths)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    assert [lengths[place] for group in groups for place in group] == sorted(lengths)
    paddings = [sum(lengths[group[-1]] - lengths[place] for place in group) for group in groups]
    assert all(padding <= PASS_TOKENS for padding in paddings)
    for padding, group, after in zip(paddings, groups, groups[1:], strict=False):
        assert padding + len(group) * (lengths[after[0]] - lengths[group[-1]]) > PASS_TOKENS


def test_worlds_that_step_together_become_what_each_becomes_alone(world_model):
    """Worlds of other histories and numbers of steps, some of them copies that share what they have seen."""
    first, second = (world_model.encode([context], depth=2) for context in (SHORT, LONG))
    copy = first.select([0])
    worlds = [first, world_model.advance(second, ["wait"]), copy, world_model.advance(copy, ["go to the kitchen"])]
    worlds += [first] * 6
    actions = ["go to the kitchen", "wait", "pick up the thermometer in the kitchen and put it down in the hallway"]
    actions += [*["wait", "open the door"] * 3, "wait"]
    groups = by_length([len(world_model.action_ids(action)) for action in actions])
    assert len(groups) == 2
    assert groups[0] != sorted(groups[0])
    together = world_model.advance_each(worlds, actions)
    for world, action, stepped in zip(worlds, actions, together, strict=True):
        alone = world_model.advance(world, [action])
        assert (stepped.steps, stepped.loops) == (alone.steps, alone.loops)
        assert stepped.state.length == alone.state.length
        torch.testing.assert_close(stepped.latent, alone.latent, atol=1e-4, rtol=1e-4)
        assert world_model.decode(stepped, 5) == world_model.decode(alone, 5)
    with pytest.raises(ValueError, match="one depth"):
        world_model.advance_each([first, world_model.encode([SHORT], depth=3)], ["wait"] * 2)
