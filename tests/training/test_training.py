from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwm.records.shards import read_shards
from loopwm.text.data.data_loader import LoaderState, horizons
from loopwm.text.data.tree import IGNORED
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.tokenizer import tokenizer_hash
from loopwm.text.training.config import ObjectiveConfig, load_config
from loopwm.text.training.program import TextProgram
from loopwm.trainer.optimizer import build_optimizers, learning_rate_factor
from loopwm.trainer.trainer import Trainer
from loopwm.training.__main__ import main
from tests.fixtures.shards import toy_episode, write_toy_shards


def records(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record.pop("kind") == kind]


def losses(folder: Path, kind: str = "train") -> list[float]:
    return [record["loss"] for record in records(folder, kind)]


@pytest.fixture(scope="module")
def finished(config_file, one_thread, tmp_path_factory) -> Path:
    """An uninterrupted run of 12 steps."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["--config", str(config_file), "--out", str(folder)]) == 0
    return folder


def command(config_file: Path, folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "loopwm.training", "--config", str(config_file), "--out", str(folder), *overrides]


def test_the_reference_recipe_has_a_share_of_every_policy_that_it_plays() -> None:
    played = set(re.findall(r"--policy (\S+)", Path("data_prep/collect_all.sh").read_text())) | {"probe"}
    assert len(played) > 8
    assert played == set(load_config(Path("configs/reference.yaml"), []).data.policies)


def test_a_run_learns_and_leaves_everything_its_folder_promises(finished):
    train = losses(finished)
    assert len(train) == 12
    assert train[-1] < 0.7 * train[0]
    assert len(losses(finished, "dev")) == 2
    record = json.loads((finished / "metrics.jsonl").read_text().splitlines()[0])
    assert {"mean_depth", "state_rms", "last_step_rms", "tokens_per_s", "grad_norm", "rate", "loss_k5"} <= record.keys()
    assert {"commit", "versions", "seed", "data", "tokenizer_hash"} <= json.loads(
        (finished / "provenance.json").read_text()
    ).keys()
    assert list((finished / "tensorboard").glob("events*"))
    assert [p.name for p in sorted((finished / "checkpoints").iterdir())] == ["step-00000009", "step-00000012"]
    model, _ = load_checkpoint(finished / "model")
    assert model.config.mu_rec == 2.0
    assert all(f.stat().st_size <= 8 * 2**20 for f in (finished / "model").iterdir())


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_losses_of_an_uninterrupted_one(config_file, finished, tmp_path):
    folder = tmp_path / "killed"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(config_file, folder), env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (folder / "checkpoints" / "step-00000006").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "kind": "tr')  # what a kill in the middle of a line leaves
    assert not (folder / "model").exists()
    subprocess.run(command(config_file, folder), check=True, env=environment, stderr=subprocess.DEVNULL)
    assert losses(folder) == pytest.approx(losses(finished), abs=1e-6)
    assert losses(folder, "dev") == pytest.approx(losses(finished, "dev"), abs=1e-6)


EVERY_MODULE = "model.overrides={prediction_heads: true, monitor_head: true, propagate: latent}"
EVERYTHING = [
    EVERY_MODULE,
    "objective={supervise: all, reward_coef: 1, continue_coef: 1, accept_coef: 1}",
    "objective.consistency_coef=1",
    "objective.contraction_coef=1",
    "objective.horizon_every=2",
    "run.steps=8",
]


def test_a_run_with_every_term_logs_them_and_resumes_with_its_median_and_its_horizon(config_file, tmp_path):
    config = load_config(config_file, EVERYTHING)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    Trainer(config, TextProgram, whole).run()
    interrupted = Trainer(config, TextProgram, parts)
    out_of_time = iter([False] * 5)
    interrupted._out_of_time = lambda *_: next(out_of_time, True)
    interrupted.run()
    resumed = Trainer(config, TextProgram, parts)
    assert resumed.step == 5
    resumed.run()
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    again = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    names = {"reward_loss", "reward_accuracy", "continue_loss", "continue_accuracy", "consistency_loss"}
    names |= {"accept_loss", "accept_accuracy", "contraction_loss", "latent_step_rms", "first_step_rms", "c_max"}
    assert names <= records[3].keys()
    assert [max(int(k[6:]) for k in r if k.startswith("loss_k")) for r in records if r["kind"] == "train"] == [
        1, 1, 2, 2, 3, 3, 4, 4,
    ]  # fmt: skip
    assert all("loss_k0" not in r for r in records)
    for name in ("loss", "c_max", "contraction_loss", "reward_loss"):
        expected = [r[name] for r in records if r["kind"] == "train"]
        assert [r[name] for r in again if r["kind"] == "train"] == pytest.approx(expected, abs=1e-6)
    firsts = [r["first_step_rms"] for r in records if r["kind"] == "train"]
    assert records[0]["c_max"] == pytest.approx(2 * firsts[0], rel=1e-5)
    assert load_checkpoint(whole / "model")[0].model.heads is not None


def test_the_horizon_grows_by_one_every_delta_steps_up_to_its_limit():
    config = ObjectiveConfig(horizon_every=3)
    assert list(islice(horizons(config, 3, 0), 11)) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]
    assert list(islice(horizons(config, 3, 4), 3)) == [2, 2, 3]
    assert list(islice(horizons(ObjectiveConfig(), 5, 0), 3)) == [5, 5, 5]


def test_a_shorter_horizon_cuts_branches_and_leaves_trunks_and_cursor_as_they_are(config_file):
    full, cut = (TextProgram(load_config(config_file, [f"objective.horizon_every={n}"])) for n in (0, 100))
    streams = full.global_batches(LoaderState()), cut.global_batches(LoaderState())
    deepest = 0
    for (batches, loader_state), (shorter, same), _ in zip(*streams, range(8), strict=False):
        assert loader_state == same
        for a, b in zip(batches, shorter, strict=True):
            assert a.row_ids == b.row_ids
            assert torch.equal(a.tokens[:, : a.trunk], b.tokens[:, : b.trunk])
            assert set(b.steps.horizon.tolist()) <= {0, 1}
            assert set(b.steps.deepest.tolist()) <= {1}
            deepest = max(deepest, *a.steps.horizon.tolist(), 0)
    assert deepest == 5


@pytest.mark.parametrize("supervise", ["terminal", "all", "every"])
def test_supervision_chooses_the_targets(config_file, supervise):
    program = TextProgram(load_config(config_file, [f"objective.supervise={supervise}"]))
    batches, _ = next(program.global_batches(LoaderState()))
    for batch in batches:
        targets = batch.label != IGNORED
        assert bool((targets & (batch.branch == 0)).any()) == (supervise == "every")
        steps = batch.steps
        if supervise == "every":  # the trunk is horizon 1
            assert int(steps.horizon[steps.supervised].min()) > 1
        else:
            expected = steps.horizon == steps.deepest if supervise == "terminal" else steps.horizon > 0
            assert torch.equal(steps.supervised, expected)
        assert int(steps.supervised.sum()) > 0
        for row in range(len(batch.row_ids)):
            branch, decode = batch.branch[row].tolist(), batch.decode[row].tolist()
            decodes = {(b, k) for b, k in zip(branch, decode, strict=True) if k > 0}
            assert len(decodes) == int((steps.supervised & (steps.row == row)).sum())


def test_rewards_and_ends_come_from_the_shards(shards):
    for episode in read_shards(shards, tokenizer_hash()):
        last = episode.last_step
        assert episode.rewards.tolist() == [0.0] + [2.0] * last
        assert episode.dones.tolist() == [False] * last + [True]


def test_max_minutes_stops_saves_and_leaves_a_run_that_goes_on(config_file, finished, tmp_path):
    folder = tmp_path / "short"
    arguments = ["--config", str(config_file), "--out", str(folder)]
    assert main([*arguments, "--max-minutes", "0"]) == 0
    assert (folder / "model" / "config.json").exists()
    assert main(arguments) == 0
    assert losses(folder) == pytest.approx(losses(finished), abs=1e-6)


def test_batches_are_a_function_of_the_cursor(config_file):
    program = TextProgram(load_config(config_file))
    stream = program.global_batches(LoaderState())
    seen = [next(stream) for _ in range(30)]
    assert seen[-1][1].places["scienceworld/random"][0] > 0  # into the second epoch
    for index in (1, 4, 29):
        saved = json.loads(json.dumps(asdict(seen[index - 1][1])))
        again, loader_state = next(TextProgram(load_config(config_file)).global_batches(LoaderState(**saved)))
        assert loader_state == seen[index][1]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(again, seen[index][0], strict=True))


def test_a_step_has_enough_rows_and_tokens_and_numbers_its_rows_over_all_micro_batches(config_file):
    program = TextProgram(load_config(config_file, ["batch={rows: 6, tokens: 2000, micro_batches: 3}"]))
    stream = program.global_batches(LoaderState())
    rows = []
    for _ in range(10):
        batches, _ = next(stream)
        assert len(batches) == 3
        rows.append(sum(len(b.row_ids) for b in batches))
        assert [row for batch in batches for row in batch.row_ids] == list(range(rows[-1]))
        assert rows[-1] >= 6
        assert sum(int((b.branch >= 0).sum()) for b in batches) >= 2000
    assert min(rows) < max(rows)


def test_learning_rate_warms_up_stays_and_falls_to_zero(config_file):
    config = load_config(config_file, ["optimizer.warmup_steps=10", "optimizer.decay_share=0.5"]).optimizer
    factors = [learning_rate_factor(step, step / 100, config) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:51] == pytest.approx([1.0] * 42)
    assert factors[75] == pytest.approx(0.5)
    assert factors[100] == 0


def test_injection_embeddings_heads_and_norms_do_not_decay_and_are_not_muons(config_file):
    program = TextProgram(load_config(config_file, [EVERY_MODULE]))
    names = {id(p): name for name, p in program.objective.named_parameters()}
    for kind in ("muon", "adamw"):
        config = load_config(config_file, [f"optimizer.name={kind}"]).optimizer
        groups = [g for o in build_optimizers(program.objective, config) for g in o.param_groups]
        decayed = {names[id(p)] for g in groups if g["weight_decay"] > 0 for p in g["params"]}
        assert kind == "adamw" or decayed == {names[id(p)] for p in groups[0]["params"]}
        assert sorted(names.values()) == sorted(names[id(p)] for g in groups for p in g["params"])
        assert all(name.endswith("proj.weight") for name in decayed)
        for layers in ("prelude.0.attention", "block.0.mlp", "coda.0.mlp", "copy.q_proj"):
            assert any(layers in name for name in decayed)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("modell.preset=tiny", "modell"),
        ("run.stepss=3", "run.stepss"),
        ("run.steps=many", "run.steps"),
        ("run.steps", "section.key=value"),
        ("optimizer.name=sgd", "optimizer.name"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: expected a finite number, got nan"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: expected a finite number, got inf"),
        ("data.envs={toy: .inf}", "data.envs.toy: expected a finite number, got inf"),
        ("optimizer.beta1=1", "optimizer.beta1: must be below 1, got 1.0"),
        ("optimizer.momentum=2", "optimizer.momentum: must be below 1, got 2.0"),
        ("data.history_share=1", "data.history_share: must be below 1, got 1.0"),
        ("model.overrides={mu_rec: 0}", "mu_rec: must be at least 1, mu_rec above 0, got 1, 1, 2, 0"),
        ("model.overrides={num_key_value_heads: -2}", "mu_rec above 0, got 1, 1, -2, 2.0"),
        ("model.overrides={coda_layers: -1}", "coda_layers: must be an integer of at least 0, got -1"),
        (
            "model.overrides={head_dim: 33, copy_attention: false}",
            "head_dim: must be even for rotary positions, got 33",
        ),
        ("data.train=[a", "data.train=[a"),
        ("model.overrides={depth: 3}", "model.overrides.depth"),
        ("model.overrides={hidden_size: 65}", "model.overrides"),
        ("data.train=[]", "data.train"),
        (
            "data.train=[a, b, ./a]",
            "data.train: must name each folder once, got a twice (use data.folder_weights={a: 2})",
        ),
        ("data.dev=[a, a]", "data.dev: must name each folder once, got a twice"),
        ("data.folder_weights={c: 2}", "data.folder_weights.c: must be a folder of data.train"),
        ("data.train=[/no/such/folder]", "/no/such/folder/index.json"),
        ("batch.micro_batches=0", "batch.micro_batches"),
        ("run.steps=-1", "run.steps"),
        ("data.supervise_trunk=true", "data.supervise_trunk"),
        ("data.regimes={observed: 1, wide: 1}", "data.regimes"),
        ("data.regimes={observed: -1}", "data.regimes.observed"),
        ("data.regimes={}", "data.regimes"),
        ("data.horizon_shares=[0.0, 1.0]", "data.horizon_shares"),
        ("data.policies={gold: 1}", "data.policies: must have a share for 'random'"),
        ("data.policies={randon: 1}", "data.policies"),
        ("data.envs={scienceworld: 0}", "data.envs: must have a share above 0"),
        ("data.history_share=1", "data.history_share"),
        ("data.trunk_tokens_max=4096", "data.trunk_tokens_max"),
        ("batch.rows=1", "batch.rows"),
        ("objective.supervise=most", "objective.supervise"),
        ("objective.contraction_coef=-1", "objective.contraction_coef"),
        ("objective.horizon_every=-1", "objective.horizon_every"),
        ("objective.reward_coef=1", "prediction_heads"),
        ("objective.consistency_coef=1", "monitor_head"),
        ("model.overrides={propagate: text}", "propagate"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_status_2(config_file, tmp_path, capsys, override, named):
    from loopwm.training.__main__ import main

    status = main(["--config", str(config_file), "--out", str(tmp_path / "run"), override])
    error = capsys.readouterr().err
    assert status == 2
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_faults_of_shards_name_those_of_dev_too(config_file, tmp_path, capsys):
    from loopwm.training.__main__ import main

    empty = tmp_path / "empty"
    write_toy_shards(empty, [replace(toy_episode(1), steps=toy_episode(1).steps[:1])])
    arguments = ["--config", str(config_file), "--out", str(tmp_path / "run")]
    assert main([*arguments, f"data.dev=[{empty}]"]) == 2
    assert "data.train, data.dev: must each contain an episode with a step, got none" in capsys.readouterr().err
    other = tmp_path / "other"
    write_toy_shards(other, [replace(toy_episode(1), task="other")])
    assert main([*arguments, f"data.dev=[{other}]", "data.tasks={scienceworld: {toy: 1}}"]) == 2
    assert "to a task in the shards of data.train and of data.dev" in capsys.readouterr().err


def test_a_run_whose_data_has_changed_is_refused(config_file, tmp_path, capsys):
    from loopwm.training.__main__ import main

    shards = tmp_path / "shards"
    write_toy_shards(shards, map(toy_episode, range(8)))
    arguments = ["--config", str(config_file), "--out", str(tmp_path / "run"), f"data.train=[{shards}]"]
    assert main([*arguments, "--max-minutes", "0.0001"]) == 0
    write_toy_shards(shards, map(toy_episode, range(9)))
    assert main(arguments) == 2
    assert "must go on with the data it began with, which has changed since" in capsys.readouterr().err


def test_a_run_that_diverges_ends_with_its_last_checkpoint(config_file, tmp_path, capsys):
    from loopwm.training.__main__ import main

    arguments = ["--config", str(config_file), "--out", str(tmp_path / "run"), "run.save_every=1"]
    assert main([*arguments, "optimizer.learning_rate=1e30", "optimizer.warmup_steps=0"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"error: step \d+: loss is (nan|inf); lower optimizer.learning_rate", error)
    kept = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert kept
    assert f"step-{int(error.split()[2][:-1]):08d}" not in kept
    assert not (tmp_path / "run/model").exists()


def test_a_folder_of_another_configuration_is_refused(config_file, finished, capsys):
    from loopwm.training.__main__ import main

    before = (finished / "metrics.jsonl").read_text()
    assert main(["--config", str(config_file), "--out", str(finished), "run.seed=1"]) == 2
    assert "another configuration" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("damage", ["missing", "flipped", "tokenizer", "format", "index"])
def test_damaged_shards_are_refused_by_name(config_file, shards, tmp_path, capsys, damage):
    from loopwm.training.__main__ import main

    folder = tmp_path / "shards"
    folder.mkdir()
    for file in shards.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    victim = folder / ("index.json" if damage in ("tokenizer", "format", "index") else "00000.tokens.npy")
    if damage == "missing":
        victim.unlink()
    elif damage == "flipped":
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
    elif damage == "tokenizer":
        victim.write_text(json.dumps(json.loads(victim.read_text()) | {"tokenizer_hash": "0"}))
    elif damage == "format":
        victim.write_text(json.dumps(json.loads(victim.read_text()) | {"format": "loopwm-shards-v1"}))
    else:
        victim.write_text("{")
    arguments = ["--config", str(config_file), "--out", str(tmp_path / "run"), f"data.train=[{folder}]"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert str(victim) in error
    assert error.count("\n") == 1
