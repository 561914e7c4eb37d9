from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml

from lab.main import main
from lab.studies.fit_gate import Decisions, decisions, gate_loss, judge, with_gate
from lab.studies.gate_loss import continue_loss
from loopwm.records.errors import InputError
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.data.tree import IGNORED
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram
from loopwm.text.world import WorldModel
from tests.fixtures.models import random_model
from tests.text import test_minimal
from tests.text.test_minimal import minimal

SLOTS = 2
LIMIT = 4


@pytest.fixture(scope="module")
def slotted_config(config_file, tmp_path_factory) -> Path:
    config = yaml.safe_load(config_file.read_text())
    config["model"]["overrides"] = {"state_slots": SLOTS}
    path = tmp_path_factory.mktemp("config") / "slots.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def batch(slotted_config) -> TreeBatch:
    return next(TextProgram(load_config(slotted_config)).global_batches(LoaderState()))[0][0]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random checkpoint without a gate, in the bfloat16 it is published in."""
    folder = tmp_path_factory.mktemp("source")
    random_model(state_slots=SLOTS).bfloat16().save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def state_token() -> int:
    return load_tokenizer().convert_tokens_to_ids("<|state|>")


def walked_horizons(batch: TreeBatch, row: int) -> list[int]:
    """Horizons of the state slots of a row, token by token."""
    seen: dict[int, int] = {}
    out = []
    for token, branch in zip(batch.tokens[row].tolist(), batch.branch[row].tolist(), strict=True):
        is_slot = token == state_token() and branch > 0
        out.append(seen.get(branch, 0) // SLOTS if is_slot else -1)
        seen[branch] = seen.get(branch, 0) + is_slot
    return out


def walked_trunk(batch: TreeBatch, row: int) -> list[tuple[list[int], list[int]]]:
    """Columns of the slots and of the targets of each of a trunk's steps that has targets, token by token."""
    out, column = [], 0
    tokens, targets = batch.tokens[row].tolist(), (batch.label[row] != IGNORED).tolist()
    while column < batch.trunk:
        if tokens[column] == state_token():
            slots, after = list(range(column, column + SLOTS)), column + SLOTS
            end = after
            while end < batch.trunk and targets[end]:
                end += 1
            if end > after:
                out.append((slots, list(range(after, end))))
            column = end
        column += 1
    return out


def test_decisions_are_scored_by_the_pass_that_ends_there_and_transitions_by_their_observation(batch):
    model, _ = with_gate(random_model(state_slots=SLOTS))
    tokens, transitions = decisions(model, batch, LIMIT)
    wanted = batch.label != IGNORED
    per_depth = []
    for depth in range(1, LIMIT + 1):
        with torch.no_grad():
            out = model.model(batch.tokens, batch.attention_mask(), batch.positions, use_cache=False, depth=depth)
            logits = model.lm_head(out.last_hidden_state).transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, batch.label, ignore_index=IGNORED, reduction="none")
        per_depth.append((losses, out.state))
        torch.testing.assert_close(tokens.loss[:, depth - 1], losses[wanted], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(tokens.states[:, depth - 1], out.state[wanted], atol=5e-5, rtol=1e-3)

    expected_states, expected_losses = [], []
    for row in range(len(batch.tokens)):
        slots = torch.tensor(walked_horizons(batch, row))
        for branch in range(1, int(batch.branch[row].max()) + 1):
            here = batch.branch[row] == branch
            for horizon in range(1, int(batch.horizon[row][here].max()) + 1):
                targets = here & (batch.horizon[row] == horizon) & wanted[row]
                if not targets.any():  # a horizon that is not decoded
                    continue
                columns = here & (slots == horizon)
                expected_losses.append([losses[row][targets].mean().item() for losses, _ in per_depth])
                expected_states.append(torch.stack([state[row][columns].mean(0) for _, state in per_depth]))
    for row in range(len(batch.tokens)):
        for columns, targets in walked_trunk(batch, row):
            expected_losses.append([losses[row][targets].mean().item() for losses, _ in per_depth])
            expected_states.append(torch.stack([state[row][columns].mean(0) for _, state in per_depth]))
    assert 0 < len(batch.steps.row[batch.steps.supervised]) < len(expected_losses)
    torch.testing.assert_close(transitions.loss, torch.tensor(expected_losses), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(transitions.states, torch.stack(expected_states), atol=1e-5, rtol=1e-4)


def test_the_loss_does_not_depend_on_how_rows_are_cut_into_batches():
    generator = torch.Generator().manual_seed(0)
    _, gate = with_gate(random_model(state_slots=SLOTS))
    torch.nn.init.normal_(gate.linear.weight, generator=generator)

    def drawn(count: int) -> Decisions:
        states = torch.randn(count, LIMIT, gate.linear.in_features, generator=generator)
        return Decisions(states, torch.rand(count, LIMIT, generator=generator))

    def part(whole: Decisions, start: int, end: int) -> Decisions:
        return Decisions(whole.states[start:end], whole.loss[start:end])

    tokens, transitions = drawn(40), drawn(7)
    cut = [(part(tokens, 0, 4), part(transitions, 0, 6)), (part(tokens, 4, 40), part(transitions, 6, 7))]
    torch.testing.assert_close(gate_loss(gate, cut), gate_loss(gate, [(tokens, transitions)]))
    lone = [(part(tokens, 0, 4), transitions), (part(tokens, 4, 40), part(transitions, 0, 0))]
    torch.testing.assert_close(gate_loss(gate, lone), gate_loss(gate, [(tokens, transitions)]))


def command(source: Path, config: Path, out: Path, *more: str) -> list[str]:
    return ["fit-gate", "--model", str(source), "--config", str(config), "--steps", "8", "--out", str(out), *more]


def test_the_second_stage_fits_the_gate_leaves_the_model_and_repeats_itself(source, slotted_config, tmp_path, capsys):
    for name in ("one", "two"):
        arguments = command(source, slotted_config, tmp_path / name, "--limit", str(LIMIT))
        assert main(arguments) == 0
    assert "transitions: dev loss" in capsys.readouterr().out
    before, _ = load_checkpoint(source)
    after, _ = load_checkpoint(tmp_path / "one")
    again, _ = load_checkpoint(tmp_path / "two")
    weights = after.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in before.state_dict().items())
    assert weights.keys() - before.state_dict().keys() == {
        "model.core.gate.linear.weight",
        "model.core.gate.linear.bias",
    }
    assert all(torch.equal(weights[name], value) for name, value in again.state_dict().items())
    report = json.loads((tmp_path / "one" / "gate.json").read_text())
    for kind in ("tokens", "transitions"):
        assert report[kind]["loss"] < 0.67  # the untrained gate's is log 2
        assert len(report[kind]["gates"]) == len(report[kind]["labels"]) == LIMIT - 1
        assert max(abs(g - 0.5) for g in report[kind]["gates"]) > 0.02
    model = WorldModel.from_pretrained(tmp_path / "one")
    program = TextProgram(load_config(slotted_config))
    kinds = [decisions(model.model, b.rows, LIMIT)[1] for b in program.evaluation_batches()]
    gate = model.model.model.core.gate
    assert judge(kinds, gate).loss == pytest.approx(report["transitions"]["loss"], abs=1e-2)  # bfloat16 in between


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--limit", "1"], "--limit: must be 2 to max_loops = 6, got 1"),
        (["--limit", "99"], "--limit: must be 2 to max_loops = 6, got 99"),
        (["model.overrides={}"], "model.overrides.state_slots"),
        (["--model", "/no/such"], "/no/such/config.json"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_bad_arguments_are_one_line_and_nothing_is_written(source, slotted_config, tmp_path, capsys, more, named):
    assert main(command(source, slotted_config, tmp_path / "out", *more)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line and "Loading weights" not in line]
    assert len(errors) == 1
    assert named in errors[0]
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_not_overwritten(source, slotted_config, capsys):
    assert main(command(source, slotted_config, source)) == 2
    assert "exists already" in capsys.readouterr().err
    load_checkpoint(source)


def test_training_with_exit_gate_is_refused(config_file):
    with pytest.raises(InputError, match=r"model\.overrides\.exit_gate: must be false, got true \(use .*fit-gate\)"):
        TextProgram(load_config(config_file, ["model.overrides={exit_gate: true}"]))


def test_gate_loss_of_minimal_equals_ours(tokenizer):
    library, model = test_minimal.model_pair()
    marks = minimal.Template(minimal.Tokenizer.from_file(str(minimal.CHECKPOINT / "tokenizer.json")))
    episodes = list(itertools.islice(minimal.read_episodes(minimal.EPISODES, marks, max_steps=5), 3))
    rows = test_minimal.plans(episodes)[:1]
    tokens, _ = decisions(library, test_minimal.library_batch(tokenizer, library.config.slots, *rows[0]), limit=4)
    expected, _ = continue_loss(library.model.core.gate(tokens.states), tokens.loss)
    (batch,) = test_minimal.minimal_batches(rows, marks)
    assert minimal.gate_loss(model, batch, limit=4).item() == pytest.approx(expected.item(), rel=1e-5)
