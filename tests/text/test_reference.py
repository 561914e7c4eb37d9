"""Training rows and worlds against the text model written out a second time with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loopwm.records.template import Context, Transition
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.tree import IGNORED, RowPlan, TreeRow
from loopwm.text.model.heads import MOST_POINTS
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.loss import TextObjective, run_rows
from loopwm.text.world import WorldModel
from tests.fixtures.models import random_model
from tests.fixtures.rows import every, row_builder
from tests.reference.text import Sizes, TextReference, causal, sees_in_row, sigmoid

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
DEPTH = 3


def moved_model(**overrides) -> LoopWMForCausalLM:
    """A random model whose injection is not what it starts from either."""
    model = random_model(block_layers=2, **overrides)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.model.core.injection.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def heads_of(heads: int, key_heads: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "head_dim": 64 // heads, "num_key_value_heads": key_heads}


def reference(model: LoopWMForCausalLM) -> TextReference:
    c = model.config
    sizes = Sizes(
        heads=c.num_attention_heads,
        key_heads=c.num_key_value_heads,
        prelude=c.prelude_layers,
        block=c.block_layers,
        coda=c.coda_layers,
        theta=c.rope_theta,
        eps=c.rms_norm_eps,
    )
    return TextReference({name: w.detach().numpy() for name, w in model.named_parameters()}, sizes)


def row_logits(model: TextReference, row: TreeRow) -> torch.Tensor:
    sees = sees_in_row(row.limit, row.branch, row.decode)
    return torch.from_numpy(model.logits(row.tokens, row.positions, sees, DEPTH)).float()


@pytest.fixture(scope="module")
def rows(tokenizer, episode) -> list[TreeRow]:
    """Two rows of different lengths, with slots in their trunks, branches at several steps and their side branches."""
    builder = row_builder(tokenizer, moved_model(state_slots=2).config.slots)
    deferred = RowPlan(0, "snapshot", 1, 2, (every(0, 3), every(2, 1)), targets_from=1)
    return [builder.build(episode, plan) for plan in (deferred, RowPlan(1, "observed", 2, 2, (every(1, 2),), 2))]


@pytest.mark.parametrize(("copy", "heads", "key_heads"), [(True, 2, 2), (False, 2, 2), (True, 4, 2), (True, 4, 1)])
def test_teacher_forcing_over_a_row_is_the_reference_at_every_token(rows, copy, heads, key_heads):
    model = moved_model(state_slots=2, copy_attention=copy, **heads_of(heads, key_heads))
    batch = TreeBatch.collate(rows, [0, 1], pad_id=0)
    with torch.no_grad():
        logits = model.lm_head(run_rows(model.model, batch, DEPTH).last_hidden_state)
        loss, _ = TextObjective(model)(batch, DEPTH, 1.0)
    nats = 0.0
    for i, row in enumerate(rows):
        columns = (batch.branch[i] >= 0).nonzero()[:, 0]
        expected = row_logits(reference(model), row)
        torch.testing.assert_close(logits[i, columns[batch.place[i, columns].argsort()]], expected, **CLOSE)
        for scores, label in zip(expected.double().numpy(), row.label, strict=True):
            if label != IGNORED:
                nats += math.log(np.exp(scores - scores[label]).sum())
    assert loss.item() == pytest.approx(nats, rel=1e-4)


CONTEXTS = [
    Context("find a tree", "You are in a room."),
    Context(
        "boil 12 cups of water",
        "This room is called the kitchen.",
        (Transition("open door", "The door is now open."),),
        "the kitchen",
        "an orange",
    ),
]
SEEN = [
    "<|goal|>find a tree<|obs|>You are in a room.<|end|>",
    "<|goal|>boil 12 cups of water<|look|>the kitchen<|inv|>an orange<|obs|>This room is called the kitchen.<|end|>"
    "<|act|>open door<|state|><|state|><|obs|>The door is now open.<|end|>",
]
ACTIONS = [["go to hall", "take the tree"], ["wait", "activate sink"]]


@pytest.mark.parametrize("key_heads", [2, 1])
def test_encoded_and_advanced_worlds_and_their_decoding_are_the_reference_over_the_whole_prompt(tokenizer, key_heads):
    model = moved_model(state_slots=2, **heads_of(2, key_heads))
    worlds, plain = WorldModel(model, tokenizer), reference(model)

    def tokens_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def check_latent(world, texts: list[str]) -> None:
        for i, text in enumerate(texts):
            ids = tokens_of(text)
            embeds = [plain.w["embed_tokens.weight"][token] for token in ids]
            latents = plain.latents(embeds, range(len(ids)), causal(len(ids)), DEPTH)[-2:]
            torch.testing.assert_close(world.latent[i], torch.from_numpy(np.stack(latents)).float(), **CLOSE)

    world = worlds.encode(CONTEXTS, DEPTH)
    check_latent(world, [text + "<|state|><|state|>" for text in SEEN])
    prompts = SEEN
    for actions in zip(*ACTIONS, strict=True):
        world = worlds.advance(world, list(actions))
        prompts = [f"{p}<|act|>{action}<|state|><|state|>" for p, action in zip(prompts, actions, strict=True)]
    check_latent(world, prompts)

    stepped: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: stepped.append(logits))
    texts = worlds.decode(world, max_new_tokens=4, greedy=True)
    hook.remove()
    for i, prompt in enumerate(prompts):
        ids, written = tokens_of(prompt + "<|obs|>"), []
        for logits in stepped:
            expected = plain.logits(ids, range(len(ids)), causal(len(ids)), DEPTH)[-1]
            torch.testing.assert_close(logits[i, 0], torch.from_numpy(expected).float(), **CLOSE)
            written.append(int(expected.argmax()))
            ids.append(written[-1])
        assert texts[i] == tokenizer.decode(written, skip_special_tokens=True)
    assert len(stepped) == 4


@pytest.mark.parametrize("key_heads", [2, 1])
def test_rewards_and_ends_are_the_reference_over_the_whole_prompt(tokenizer, key_heads):
    overrides = {"prediction_heads": True, "reward_attention": True}
    model = moved_model(state_slots=1, **heads_of(2, key_heads), **overrides)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (*model.model.reward_attention.parameters(), *model.model.heads.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    worlds, plain = WorldModel(model, tokenizer), reference(model)
    world = worlds.encode(CONTEXTS, DEPTH)
    prompts = [text.replace("<|state|><|state|>", "<|state|>") for text in SEEN]
    for actions in zip(*ACTIONS, strict=True):
        world = worlds.advance(world, list(actions))
        prompts = [f"{p}<|act|>{action}<|state|>" for p, action in zip(prompts, actions, strict=True)]
    ahead = worlds.predictions(world)
    points = np.arange(-MOST_POINTS, MOST_POINTS + 1)
    for i, prompt in enumerate(prompts):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        embeds = [plain.w["embed_tokens.weight"][token] for token in ids]
        outcome = plain.outcomes(embeds, range(len(ids)), causal(len(ids)), DEPTH)[-1]
        logits = plain.w["heads.points.weight"] @ outcome + plain.w["heads.points.bias"]
        shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        ends = plain.w["heads.continuation.weight"][0] @ outcome + plain.w["heads.continuation.bias"][0]
        assert ahead.expected_reward[i].item() == pytest.approx(shares @ points, abs=2e-3)
        assert ahead.continuation[i].item() == pytest.approx(sigmoid(ends.item()), abs=1e-4)


def test_reward_attention_changes_neither_texts_nor_acceptance_nor_monitor(tokenizer):
    plain = moved_model(prediction_heads=True, monitor_head=True)
    model = moved_model(prediction_heads=True, monitor_head=True, reward_attention=True)
    model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for parameter in (*model.model.reward_attention.parameters(), *model.model.heads.outcome.parameters()):
            parameter.add_(0.5 * torch.randn(parameter.shape))
    found = []
    for each in (plain, model):
        worlds = WorldModel(each, tokenizer)
        world = worlds.advance(worlds.encode(CONTEXTS, DEPTH), ["go to hall", "wait"])
        ahead = worlds.predictions(world)
        found.append(
            (worlds.decode(world, 8, greedy=True), ahead.acceptance, worlds.monitor(world), ahead.continuation)
        )
    (texts, accepted, summary, _), (same_texts, same_accepted, same_summary, _) = found
    assert texts == same_texts
    assert torch.equal(accepted, same_accepted)
    assert torch.equal(summary, same_summary)
    assert not torch.allclose(found[0][3], found[1][3])
