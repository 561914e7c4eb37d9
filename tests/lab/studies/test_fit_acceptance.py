from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lab.main import main
from lab.studies.acceptance import context_of
from lab.studies.fit_acceptance import Candidates, judge, read_candidates, read_rows
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import AcceptanceHead
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram
from loopwm.text.world import WorldModel
from tests.fixtures.models import random_model

STATES = [
    {
        "goal": "Find the lamp.",
        "steps": [[None, f"You are in room {i}."], ["look", "A lamp is here."]],
        "candidates": [[f"take lamp {i}", True], ["open door to the hall", i % 2 == 0], [f"go to room {9 - i}", False]],
    }
    for i in range(8)
]


@pytest.fixture
def source(tokenizer, tmp_path) -> Path:
    random_model(prediction_heads=True).bfloat16().save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def write_states(path: Path) -> Path:
    path.write_text("".join(json.dumps(state) + "\n" for state in STATES), encoding="utf-8")
    return path


def test_only_the_acceptance_head_is_fitted_and_it_learns_what_the_simulator_did(source, config_file, tmp_path, capsys):
    states, out = write_states(tmp_path / "states.jsonl"), tmp_path / "fitted"
    files = ["--model", str(source), "--train", str(states), "--dev", str(states), "--config", str(config_file)]
    assert main(["fit-acceptance", *files, "--steps", "1", "--out", str(out), "--epochs", "3000", "--rate", "0.1"]) == 0
    report = json.loads((out / "acceptance.json").read_text())
    before, after = report["before"], report["after"]
    refused = sum(not truth for state in STATES for _, truth in state["candidates"])
    assert (after["states.jsonl"]["n"], after["states.jsonl"]["refused"]["n"]) == (3 * len(STATES), refused)
    assert report["train"]["n"] > 3 * len(STATES)  # rows, too
    assert before["states.jsonl"] != after["states.jsonl"]
    assert after["states.jsonl"]["accepted"]["f1"] > 0.7
    assert after["rows"]["accepted"]["recall"] > 0.9
    assert f"F1 of what is accepted {after['rows']['accepted']['f1']:.3f}" in capsys.readouterr().out
    old, new = (load_checkpoint(folder)[0].state_dict() for folder in (source, out))
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {f"model.heads.acceptance.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")}


def test_the_head_reads_what_the_model_predicts_from(tokenizer):
    model = random_model(prediction_heads=True)
    worlds = WorldModel(model, tokenizer)
    candidates = read_candidates(worlds, STATES[:2])
    assert candidates.accepted.tolist() == [truth for state in STATES[:2] for _, truth in state["candidates"]]
    expected = [
        worlds.predictions(worlds.advance(worlds.encode([context_of(state)]), [action])).acceptance
        for state in STATES[:2]
        for action, _ in state["candidates"]
    ]
    with torch.no_grad():
        found = model.model.heads.acceptance(candidates.latent)[:, 0].sigmoid()
    torch.testing.assert_close(found, torch.cat(expected))


def test_rows_give_their_supervised_steps(source, config_file):
    model, _ = load_checkpoint(source)
    ((batch, *_), _) = next(TextProgram(load_config(config_file)).global_batches(LoaderState()))
    rows = read_rows(model, [batch])
    expected = torch.cat([group.accepted[group.supervised] for group in (batch.steps, batch.trunk_steps)])
    assert rows.accepted.tolist() == expected.tolist()
    with torch.no_grad():
        out = model.model(batch.tokens, batch.attention_mask(), batch.positions, use_cache=False, depth=2)
        logits = model.model.heads(batch.steps.at_slots(out.latent)[batch.steps.supervised])[2]
        torch.testing.assert_close(model.model.heads.acceptance(rows.latent)[: len(logits), 0], logits)


def test_a_head_is_judged_by_what_it_accepts_and_refuses():
    head = AcceptanceHead(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(1.0)
        head[2].bias.fill_(-1.5)
    row = judge(
        head,
        Candidates(
            torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0], [-3.0, 0.0]]), torch.tensor([True, False, False, True])
        ),
    )
    assert row["accepted"] == {"n": 2, "predicted": 2, "precision": 0.5, "recall": 0.5, "f1": 0.5}
    assert row["refused"] == {"n": 2, "predicted": 2, "precision": 0.5, "recall": 0.5, "f1": 0.5}


def test_bad_arguments_are_one_line(source, tokenizer, config_file, tmp_path, capsys):
    states = str(write_states(tmp_path / "states.jsonl"))
    arguments = ["fit-acceptance", "--train", states, "--dev", states, "--config", str(config_file), "--steps", "1"]
    assert main([*arguments, "--model", str(source), "--out", str(source)]) == 2
    assert capsys.readouterr().err == f"error: --out: {source} exists already\n"
    new = ["--model", str(source), "--out", str(tmp_path / "new")]
    for dev in ([states, str(tmp_path / "more" / "states.jsonl")], [str(tmp_path / "rows")]):
        assert main([*arguments, *new, "--dev", *dev]) == 2
        assert "--dev: file names must differ, from 'rows' too, got " in capsys.readouterr().err
    random_model().save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    assert main([*arguments, "--model", str(tmp_path / "plain"), "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.endswith("--model: has no prediction heads\n")
