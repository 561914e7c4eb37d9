from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lab.main import main
from lab.studies.fit_rewards import Steps, judge, read_steps
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import MOST_POINTS, PredictionHeads
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram
from tests.fixtures.models import random_model


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    random_model(prediction_heads=True).bfloat16().save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def test_only_the_reward_head_is_fitted_and_it_learns_the_rewards(source, config_file, tmp_path, capsys):
    arguments = ["fit-rewards", "--model", str(source), "--config", str(config_file), "--steps", "2", "--rate", "0.1"]
    assert main([*arguments, "--out", str(tmp_path / "fitted")]) == 0
    report = json.loads((tmp_path / "fitted" / "rewards.json").read_text())
    assert report["train"]["loss"] < report["before"]["loss"] / 2
    assert f"after: loss {report['after']['loss']:.4f}" in capsys.readouterr().out
    before, after = (load_checkpoint(folder)[0].state_dict() for folder in (source, tmp_path / "fitted"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.heads.points.weight", "model.heads.points.bias"}


def test_steps_are_those_with_a_reward_and_their_latents_are_what_the_head_reads(source, config_file):
    model, _ = load_checkpoint(source)
    ((batch, *_), _) = next(TextProgram(load_config(config_file)).global_batches(LoaderState()))
    steps = read_steps(model, [batch])
    rewards = torch.cat([group.reward[group.supervised] for group in (batch.steps, batch.trunk_steps)])
    assert (steps.points - MOST_POINTS).tolist() == rewards[~rewards.isnan()].round().tolist()
    with torch.no_grad():
        out = model.model(batch.tokens, batch.attention_mask(), batch.positions, use_cache=False, depth=2)
        expected = model.model.heads(batch.steps.at_slots(out.latent)[batch.steps.supervised])[0]
        torch.testing.assert_close(model.model.heads.points(steps.latent)[: len(expected)], expected)


def test_a_head_is_judged_by_zero_and_other_rewards_apart():
    heads = PredictionHeads(2)
    with torch.no_grad():
        heads.points.bias[MOST_POINTS] = 30  # always 0
    points = torch.tensor([0, 0, 0, 5]) + MOST_POINTS
    row = judge(heads, Steps(torch.zeros(4, 2), points))
    assert (row["right"], row["right_paid"], row["right_unpaid"], row["n_paid"]) == (0.75, 0, 1, 1)


def test_bad_arguments_are_one_line(source, config_file, tmp_path, capsys):
    arguments = ["fit-rewards", "--config", str(config_file), "--steps", "1"]
    assert main([*arguments, "--model", str(source), "--out", str(source)]) == 2
    assert capsys.readouterr().err == f"error: --out: {source} exists already\n"
    plain = tmp_path / "plain"
    random_model().save_pretrained(plain)
    load_tokenizer().save_pretrained(plain)
    assert main([*arguments, "--model", str(plain), "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.endswith("--model: has no prediction heads\n")
