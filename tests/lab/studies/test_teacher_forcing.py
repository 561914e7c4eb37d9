"""Losses of true observations."""

from __future__ import annotations

import pytest
import torch

from lab.studies.teacher_forcing import nll, nll_of_rows
from loopwm.records import template
from loopwm.records.files import PACKAGED
from loopwm.records.template import FormatError
from loopwm.text.world import WorldModel
from loopwm.worlds.local import LocalWorlds
from tests.text.test_world import ACTIONS, LONG, SHORT
from tests.worlds.test_protocol import HALL, KITCHEN


def test_teacher_forced_losses_are_those_of_whole_prompts_and_leave_the_world_as_it_was(tiny_model, tokenizer):
    world_model = WorldModel(tiny_model, tokenizer)
    observations = ["You move to the hall.", "You wait for 10 turns. Nothing else happens here."]
    world = world_model.encode([SHORT, LONG], depth=3)
    for k in (1, 2, 3):
        world = world_model.advance(world, [row[k - 1] for row in ACTIONS])
    before = world_model.decode(world, 8)
    nats, tokens = nll(world_model, world, observations)
    for i, (context, actions) in enumerate(zip((SHORT, LONG), ACTIONS, strict=True)):
        texts = (template.render_prompt(context, actions), observations[i] + template.END)
        prompt, target = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        with torch.no_grad():
            logits = tiny_model(torch.tensor([prompt + target]), depth=3).logits[0, len(prompt) - 1 : -1]
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum")
        torch.testing.assert_close(nats[i], expected, atol=1e-3, rtol=1e-4)
        assert tokens[i] == len(target)
    assert world_model.decode(world, 8) == before
    with pytest.raises(FormatError, match="observations"):
        nll(world_model, world, observations[:1])


def test_trust_is_the_probability_of_the_text():
    worlds = LocalWorlds.from_pretrained(PACKAGED)
    worlds.begin([HALL, KITCHEN])
    steps = worlds.step(["open door to kitchen", "eat wood"])
    losses, _ = nll_of_rows(worlds, [step.observation for step in steps])
    assert [step.finish for step in steps] == ["stop", "stop"]
    assert [step.trust for step in steps] == pytest.approx((-losses).exp().tolist(), rel=1e-3)
    assert [step.trust for step in worlds.step(["wait", "wait"], decode=False)] == [None, None]
