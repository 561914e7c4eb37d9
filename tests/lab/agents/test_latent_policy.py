"""The policy on latents: what it may do, what it reads, and its scores against a slow reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.agents.latent_policy import Choice, Choices, LatentPolicy, PolicyAgent, Reading, actions_in_reach, named_in
from loopwm.core.block import AttentionInputs, rotary_angles
from loopwm.records.template import Context, Transition
from loopwm.text.world import WorldModel
from tests.fixtures.kitchen import START
from tests.fixtures.models import random_model

GOAL = "Your task is to: put a hot mug in cabinet."
FRIDGE = Transition("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed.")
OPEN = Transition("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a mug 1, and a egg 2.")
TAKE = Transition("take mug 1 from fridge 1", "You pick up the mug 1 from the fridge 1.")
OVEN = Transition("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed.")
DESK = Transition("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a desklamp 1.")


def state(*steps: Transition) -> Context:
    return Context(GOAL, START + "put a hot mug in cabinet.", steps)


@pytest.fixture(scope="module")
def model(tokenizer) -> WorldModel:
    return WorldModel(random_model(prediction_heads=True, reward_attention=True), tokenizer)


@pytest.fixture(scope="module")
def policy(model) -> LatentPolicy:
    torch.manual_seed(0)
    made = LatentPolicy(model.model)
    with torch.no_grad():
        made.score.weight.normal_()
        made.attention.o_proj.weight.normal_(std=0.1)
    return made


def choices_of(model: WorldModel, *contexts: Context) -> list[Choice]:
    with torch.inference_mode():
        return [Reading(model, context).look(actions_in_reach(context))[1] for context in contexts]


@pytest.mark.parametrize(
    ("steps", "near"),
    [
        ((), []),
        ((FRIDGE,), ["open fridge 1"]),
        ((FRIDGE, OPEN), ["take mug 1 from fridge 1", "take egg 2 from fridge 1"]),
        ((FRIDGE, OPEN, TAKE), ["cool mug 1 with fridge 1", "move mug 1 to fridge 1"]),
        ((FRIDGE, OPEN, TAKE, OVEN), ["open microwave 1", "heat mug 1 with microwave 1"]),
        ((DESK,), ["take desklamp 1 from countertop 1", "use desklamp 1"]),
        ((FRIDGE, OPEN, TAKE, DESK), ["move mug 1 to countertop 1", "use desklamp 1"]),
    ],
)
def test_actions_are_what_was_seen_allows(steps, near) -> None:
    actions = actions_in_reach(state(*steps))
    assert actions[: len(near)] == near
    here = steps[-1].action if steps and steps[-1].action.startswith("go") else "go to fridge 1" if steps else None
    places = ["cabinet 2", "cabinet 1", "countertop 1", "fridge 1", "microwave 1", "desklamp 1"]
    assert actions[len(near) :] == [f"go to {place}" for place in places if f"go to {place}" != here]


@pytest.mark.parametrize(
    ("action", "named"),
    [("take mug 1 from desk 1", 1), ("move egg 1 to cabinet 2", 2), ("move mug 1 to cabinet 2", 3), ("open desk 1", 0),
     ("go to cabinet 1", 2)],
)  # fmt: skip
def test_a_goal_names_the_thing_or_the_place_of_an_action(action, named) -> None:
    assert named_in(GOAL, action) == named


def test_what_is_read_step_by_step_is_what_one_pass_reads(model) -> None:
    (choice,) = choices_of(model, state(FRIDGE, OPEN))
    text = torch.tensor([[*model.context_ids(state(FRIDGE, OPEN)), *model.action_ids(choice.actions[1])[:-1]]])
    with torch.inference_mode():
        out = model.model.model(text, use_cache=False)
    width = model.model.config.hidden_size
    expected = torch.cat([out.state, out.latent[..., :width]], -1)[0]
    read, own = torch.cat(list(choice.read)).float(), choice.after[1, -int(choice.tokens[1]) :].float()
    torch.testing.assert_close(torch.cat([read, own]), expected, atol=0.02, rtol=0.01)  # half precision


@torch.no_grad()
def slow_score(policy: LatentPolicy, choice: Choice, action: int) -> Tensor:
    """Score one action by one causal attention over all that it reads, heads one by one."""
    attention, config = policy.attention, policy._config
    row = torch.cat([*choice.read, choice.after[action, -int(choice.tokens[action]) :]]).float()[None]
    state, h = row.chunk(2, -1)
    angles = rotary_angles(
        torch.arange(row.shape[1])[None], config.head_dim, config.rope_theta, config.rope_frequencies
    )
    k, v = attention.keys_values(h, state, AttentionInputs(*angles))
    q = attention.queries(h, *angles)[0, :, -1]
    heads = [(k[0, 0] @ one / config.head_dim**0.5).softmax(0) @ v[0, 0] for one in q]
    named = policy.of_named.weight[choice.named[action]]
    outcome = policy.layer(attention.with_context(h[0, -1:], torch.cat(heads)[None]) + named)
    return policy.score(outcome)[0, 0] + choice.predicted[action] @ policy.of_predicted


def test_scores_are_those_of_each_action_by_itself_whatever_is_padded(model, policy) -> None:
    choices = choices_of(model, state(), state(FRIDGE, OPEN), state(FRIDGE, OPEN, TAKE, OVEN))
    logits = policy(Choices.of(choices))
    for row, choice in zip(logits, choices, strict=True):
        expected = torch.stack([slow_score(policy, choice, i) for i in range(len(choice.actions))])
        torch.testing.assert_close(row[: len(choice.actions)].detach(), expected, atol=1e-4, rtol=1e-4)
        assert row.softmax(-1)[len(choice.actions) :].sum() == 0


def test_a_policy_starts_from_what_is_predicted(model) -> None:
    (choice,) = choices_of(model, state(FRIDGE))
    logits = LatentPolicy(model.model)(Choices.of([choice]))[0]
    expected = choice.predicted @ torch.tensor([3.0, 0.0, 1.0])
    torch.testing.assert_close(logits - logits[0], expected - expected[0])


def test_the_agent_takes_the_best_action_and_stops_where_no_more_can_be_read(model, policy) -> None:
    agent, context = PolicyAgent(model, policy), state(FRIDGE)
    first = agent.act(context)
    (choice,) = choices_of(model, context)
    assert first == choice.actions[int(policy(Choices.of([choice])).argmax())]
    assert agent.act(state(FRIDGE, OPEN)) in actions_in_reach(state(FRIDGE, OPEN))
    assert agent.act(state(FRIDGE, *[OPEN] * 199)) is None
