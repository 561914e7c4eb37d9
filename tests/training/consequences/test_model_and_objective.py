"""The model and the terms of its loss are those of the configuration."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loopwm.records.errors import InputError
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.data.tree import IGNORED
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import fourier_features, integer_tokens, load_tokenizer
from loopwm.text.training import loss as objective
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram, export_model, model_config, new_model
from loopwm.trainer.trainer import Trainer
from loopwm.training.__main__ import main
from tests.training.consequences.watched import (
    loss_of,
    program_of,
    rows_seen,
    shows,
)


@shows("model.preset", "model.overrides")
def test_the_model_is_the_preset_with_what_is_changed_in_it(config_file):
    def sizes(*overrides: str) -> tuple[int, int]:
        model = program_of(config_file, *overrides).objective.model.model
        return model.embed_tokens.embedding_dim, len(model.core.block)

    assert sizes() == (64, 1)
    assert sizes("model.preset=small") == (384, 3)
    assert sizes("model.overrides={block_layers: 2}") == (64, 2)


@shows("model.integers")
def test_integers_start_from_features_of_the_number_and_other_tokens_as_ever(config_file):
    tokenizer = load_tokenizer()
    values = integer_tokens(tokenizer)
    assert set(values.values()) >= set(range(101))
    rows = torch.tensor(sorted((i for i in values if values[i] <= 100), key=lambda i: values[i]))

    def embeddings(start: str) -> Tensor:
        torch.manual_seed(0)
        model = program_of(config_file, f"model.integers={start}").objective.model
        return model.model.embed_tokens.weight.detach()

    at_random, fourier = embeddings("random"), embeddings("fourier")
    others = [i for i in range(len(tokenizer)) if i not in values]
    assert torch.equal(at_random[others], fourier[others])
    torch.testing.assert_close(at_random[rows].norm(dim=1), fourier[rows].norm(dim=1), atol=0.25, rtol=0)
    number = torch.tensor([values[int(i)] for i in rows], dtype=torch.float32)
    features = fourier_features(number)

    def explained(embedding: Tensor) -> float:
        """Share of the integers' embeddings that is a linear function of the features."""
        found = features @ (torch.linalg.pinv(features, rtol=1e-3) @ embedding[rows])  # the sine of period 2 is zero
        return float((found.norm() / embedding[rows].norm()) ** 2)

    assert explained(fourier) > 0.7 > 0.3 > explained(at_random)


@shows("model.weights")
def test_a_run_begins_with_the_weights_of_a_finished_one_of_the_same_shape(config_file, tmp_path, capsys):
    Trainer(load_config(config_file, ["run.steps=2", "data.dev=[]"]), TextProgram, tmp_path / "run").run()
    model = tmp_path / "run" / "model"
    given = LoopWMForCausalLM.from_pretrained(model).state_dict()
    begun = program_of(config_file, f"model.weights={model}", "run.seed=5").objective.model.state_dict()
    assert all(torch.equal(begun[name], given[name]) for name in begun)
    with_gate = LoopWMForCausalLM(LoopWMConfig(**LoopWMConfig.from_pretrained(model).to_dict() | {"exit_gate": True}))
    with_gate.load_state_dict(given, strict=False)
    export_model(with_gate, load_tokenizer(), tmp_path / "gated")
    begun = program_of(config_file, f"model.weights={tmp_path / 'gated'}").objective.model.state_dict()
    assert all(torch.equal(begun[name], given[name]) for name in begun)
    arguments = ["--config", str(config_file), "--out", str(tmp_path / "other"), f"model.weights={model}"]
    assert main([*arguments, "model.overrides={block_layers: 2}"]) == 2
    assert main([*arguments[:-1], "model.weights=nowhere"]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert [line[:22] for line in told] == [
        "error: model.weights: ",
        "error: nowhere/config.",
    ]
    assert "; model.preset=weights takes their shape" in told[0]


def test_the_reference_configuration_goes_on_from_the_shipped_weights():
    shipped = "loopwm/pretrained"
    config = load_config(Path("configs/reference.yaml"), ["model.preset=weights", f"model.weights={shipped}"])
    tokenizer = load_tokenizer()
    begun = new_model(model_config(config.model, len(tokenizer)), config, tokenizer).state_dict()
    given = LoopWMForCausalLM.from_pretrained(shipped).float().state_dict()
    assert all(torch.equal(begun[name], given[name]) for name in begun)


@shows("system")
def test_the_system_decides_what_is_trained(config_file, tmp_path, capsys):
    assert main(["--config", str(config_file), "--out", str(tmp_path / "run"), "system=twisted"]) == 2
    assert "batch.tokens: unknown key" in capsys.readouterr().err  # of that system, which counts frames


@shows("objective.supervise")
@pytest.mark.parametrize(("supervise", "trunk", "shallow"), [("terminal", 0, 0), ("all", 0, 1), ("every", 1, 1)])
def test_targets_are_where_supervise_says(config_file, supervise, trunk, shallow):
    program = program_of(config_file, f"objective.supervise={supervise}")
    in_trunk = in_shallow = 0
    for batch, row in rows_seen(program, 8):
        targets = batch.label[row] != IGNORED
        in_trunk += int((targets & (batch.branch[row] == 0)).sum())
        for number in range(1, int(batch.branch[row].max()) + 1):
            of_branch = targets & (batch.branch[row] == number)
            in_shallow += len(set(batch.horizon[row][of_branch].tolist())) > 1
    assert (in_trunk > 0, in_shallow > 0) == (bool(trunk), bool(shallow))


@shows("objective.horizon_every")
def test_the_deepest_branch_grows_by_one_every_so_many_steps(config_file):
    program = program_of(config_file, "objective.horizon_every=2", "batch={rows: 12, tokens: 64, micro_batches: 1}")
    deepest = [int(batch.steps.deepest.max()) for (batch,), _ in islice(program.global_batches(LoaderState()), 8)]
    assert deepest == [1, 1, 2, 2, 3, 3, 4, 4]


HEADS = "model.overrides={prediction_heads: true, monitor_head: true}"


@shows(
    "objective.reward_coef", "objective.continue_coef", "objective.accept_coef", "objective.consistency_coef",
    "objective.contraction_coef",
)  # fmt: skip
@pytest.mark.parametrize(
    ("key", "term"),
    [
        ("reward_coef", "reward_loss"),
        ("continue_coef", "continue_loss"),
        ("accept_coef", "accept_loss"),
        ("consistency_coef", "consistency_loss"),
        ("contraction_coef", "contraction_loss"),
    ],
)
def test_a_term_is_added_as_often_as_its_coefficient_says(config_file, key, term):
    plain, measured, _ = loss_of(config_file, [HEADS])
    summed = measured[term][0].item()
    assert summed > 0.1
    for coefficient in (1.0, 3.0):
        loss, _, _ = loss_of(config_file, [HEADS, f"objective.{key}={coefficient}"])
        assert loss - plain == pytest.approx(coefficient * summed / 100, rel=1e-3, abs=1e-5)


@shows("objective.bag_coef")
def test_the_words_of_every_step_are_asked_for_as_often_as_their_coefficient_says(config_file):
    """Trunk steps and the steps between of branches that decode their last one alone, read from before the coda."""
    plain, without, _ = loss_of(config_file, [])
    losses = {}
    for coefficient in (1.0, 3.0):
        keys = [f"objective.bag_coef={coefficient}"]
        losses[coefficient], measured, batch = loss_of(config_file, keys)
        summed, steps = measured["bag_loss"].tolist()
        assert losses[coefficient] - plain == pytest.approx(coefficient * summed / 100, rel=1e-3)
        assert steps == len(batch.trunk_steps.row) + int((batch.steps.horizon > 0).sum())
    assert "bag_loss" not in without
    assert summed > 0.1


@shows("objective.state_coef", "objective.state_change_weight")
def test_latents_are_asked_for_the_words_of_the_state(config_file, monkeypatch):
    """At h_0, deferred and trunk steps; a word that the step before did not show weighs more."""
    asked = {}
    words_loss = objective.state_words_loss

    def watching(name, logits, bags):
        asked[name] = [text for bag in bags for text in bag.tokens]
        return words_loss(name, logits, bags)

    monkeypatch.setattr(objective, "state_words_loss", watching)
    plain, without, _ = loss_of(config_file, [])
    keys = ["objective.state_coef=3.0", "objective.state_change_weight=5.0"]
    loss, measured, batch = loss_of(config_file, keys)
    summed = sum(measured[name][0] for name in ("look_loss", "inventory_loss")).item()
    assert loss - plain == pytest.approx(3.0 * summed / 100, rel=1e-3)
    assert measured["look_loss"][1] == len(batch.trunk_steps.row) + len(batch.steps.row)
    assert "look_loss" not in without
    tokenizer = load_tokenizer()
    assert all("called the" in tokenizer.decode(text) for text in asked["look"])
    assert not any("called the" in tokenizer.decode(text) for text in asked["inventory"])
    look, inventory = batch.trunk_steps.state
    assert {tokenizer.decode(text).split("<|pad|>")[0] for text in inventory.tokens} == {"an orange"}
    rooms = [tokenizer.decode(text).split("called the ")[1].split(".")[0] for text in look.tokens]
    assert set(rooms) == {"hall", "kitchen"}
    for steps in (batch.trunk_steps, batch.steps):
        for observation, text in zip(steps.observation, steps.state[0].tokens, strict=True):
            place = tokenizer.decode(observation).partition("You are in the ")[2].split(".")[0]
            assert f"called the {place}" in tokenizer.decode(text)  # of the same step
    heaviest = [weight.max().item() for weight in look.weight]
    assert set(heaviest) == {1.0, 5.0}  # of the rooms that were entered, and of those that were not left
    assert set(inventory.weight.flatten().tolist()) <= {0.0, 1.0}


@shows("objective.integer_weights")
def test_an_integer_to_be_told_counts_as_often_as_its_world_says(config_file, monkeypatch):
    nats: list[Tensor] = []
    plain_loss = objective.observation_loss

    def watching(loss_N, weight_N, *rest):
        nats.append(loss_N)
        return plain_loss(loss_N, weight_N, *rest)

    monkeypatch.setattr(objective, "observation_loss", watching)
    plain, _, batch = loss_of(config_file, [])
    weighted, measured, heavier = loss_of(config_file, ["objective.integer_weights={scienceworld: 4.0}"])
    tokenizer = load_tokenizer()
    labels = batch.label[batch.label != IGNORED]
    integers = torch.tensor([tokenizer.decode([label]).strip().isdigit() for label in labels.tolist()])
    assert 0 < integers.sum() < len(integers)
    assert heavier.weight[batch.label != IGNORED].tolist() == [4.0 if i else 1.0 for i in integers]
    assert weighted - plain == pytest.approx(3 * nats[0][integers].sum().item() / 100, rel=1e-4)
    assert measured["loss"].sum().item() == pytest.approx(nats[0].sum().item(), rel=1e-5)
    with pytest.raises(InputError, match=r"objective.integer_weights.alfworld: must have an episode in data.train"):
        program_of(config_file, "objective.integer_weights={alfworld: 2.0}")


@shows("objective.opening_weights")
def test_the_first_token_of_an_observation_counts_as_often_as_its_world_says(config_file):
    _, _, plain = loss_of(config_file, [])
    _, _, heavier = loss_of(config_file, ["objective.opening_weights={scienceworld: 3.0}"])
    _, _, both = loss_of(
        config_file, [f"objective.{key}_weights={{scienceworld: 3.0}}" for key in ("opening", "integer")]
    )
    opens = [
        label != IGNORED and (at == 0 or row[at - 1] == IGNORED)
        for row in plain.label.tolist()
        for at, label in enumerate(row)
    ]
    integers = loss_of(config_file, ["objective.integer_weights={scienceworld: 3.0}"])[2].weight
    assert 0 < sum(opens) < plain.targets
    assert heavier.weight.flatten().tolist() == [3.0 if o else 1.0 for o in opens]
    assert both.weight.equal(heavier.weight * integers)
    with pytest.raises(InputError, match=r"objective.opening_weights.alfworld: must have an episode in data.train"):
        program_of(config_file, "objective.opening_weights={alfworld: 2.0}")
