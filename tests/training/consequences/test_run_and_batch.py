"""Runs log, evaluate, save and resume as the configuration says; batches have its size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from loopwm.core.block import Block
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram
from loopwm.trainer.trainer import Trainer
from tests.training.consequences.watched import SETTINGS, Watched, briefly, program_of, shows


@shows("run.eval_every", "run.eval_batches", "data.dev", "data.train")
def test_dev_is_evaluated_on_its_own_rows_at_the_default_depth_of_the_model(watched):
    tokenizer = load_tokenizer()
    goals = {True: "walk about", False: "stand still"}
    assert [record["step"] for record in watched.records("dev")] == [4, 8]
    assert [record["mean_depth"] for record in watched.records("dev")] == [3, 3]
    evaluated = [forward for forward in watched.forwards if not forward.training]
    assert {forward.depth for forward in evaluated} == {3}
    half = len(evaluated) // 2
    for first, again in zip(evaluated[:half], evaluated[half:], strict=True):
        assert torch.equal(first.batch.tokens, again.batch.tokens)
    stream = watched.trainer.program.dev_stream
    rows = sum(len(planned) for planned, _ in islice(stream.steps(LoaderState()), 3))
    assert sum(len(forward.batch.row_ids) for forward in evaluated[:half]) == rows
    for forward in watched.forwards:
        texts = tokenizer.batch_decode(forward.batch.tokens)
        assert all(text.startswith(f"<|goal|>{goals[forward.training]}") for text in texts)


@shows("run.log_every", "run.save_every", "run.keep_checkpoints")
def test_runs_log_and_save_when_they_say_and_keep_the_newest(watched):
    assert [record["step"] for record in watched.records("train")] == [2, 4, 6, 8]
    kept = sorted(path.name for path in (watched.folder / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006", "step-00000008"]


@shows("run.seed")
def test_another_seed_is_another_run_and_the_same_one_is_not(config_file):
    def first(seed: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        torch.manual_seed(seed)
        program = program_of(config_file, f"run.seed={seed}", "batch={rows: 16, tokens: 64, micro_batches: 1}")
        (batch,), _ = next(program.global_batches(LoaderState()))
        weights = program.objective.model.model.embed_tokens.weight.detach()
        return weights, batch.tokens, program.depth_plan(0, batch).loops

    one, again, other = first(1), first(1), first(2)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def test_dev_rows_are_the_same_for_every_seed(config_file, dev_shards):
    one, other = (
        [batch.rows.tokens for batch in program_of(config_file, f"run.seed={seed}", f"data.dev=[{dev_shards}]")
         .evaluation_batches()]
        for seed in (1, 2)
    )  # fmt: skip
    assert one
    assert all(map(torch.equal, one, other))


@pytest.fixture
def new_accelerator() -> Iterator[None]:
    """A process has one precision for good, unless it forgets."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@shows("run.mixed_precision")
@pytest.mark.usefixtures("new_accelerator")
@pytest.mark.parametrize(
    ("precision", "faster", "dtype"),
    [
        ("no", "bf16", torch.float32),
        ("bf16", "no", torch.bfloat16),
        ("auto", "no", torch.float32),
        ("auto", "bf16", torch.bfloat16),
    ],
)
def test_products_run_in_the_precision_asked_for_and_weights_stay_whole(
    config_file, tmp_path, precision, faster, dtype
):
    seen = set()
    linear = torch.nn.functional.linear

    def watching(*arguments, **named):
        out = linear(*arguments, **named)
        seen.add(out.dtype)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", watching)
        patch.setattr("loopwm.trainer.trainer.faster_precision", lambda: faster)
        run = briefly(config_file, tmp_path, f"run.mixed_precision='{precision}'", "run.steps=1")
    assert seen == {dtype}
    assert all(after.dtype == torch.float32 for update in run.updates for after in update.after.values())


@shows("run.compile_layers")
@pytest.mark.parametrize(("wanted", "compiler"), [(True, True), (True, False), (False, True)])
def test_layers_are_compiled_where_that_is_asked_for_and_possible(config_file, tmp_path, monkeypatch, wanted, compiler):
    calls: Counter[str] = Counter()

    def compiled(function, dynamic):
        assert dynamic
        return lambda *arguments: calls.update([function.__name__]) or function(*arguments)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("loopwm.trainer.trainer.compiler_found", lambda: compiler)
    run = briefly(config_file, tmp_path, f"run.compile_layers={str(wanted).lower()}", "run.steps=1")
    assert len(run.updates) > 0
    assert set(calls) == ({"before_attention", "after_attention"} if wanted and compiler else set())


@shows("run.activation_checkpointing")
@pytest.mark.parametrize("wanted", [True, False])
def test_layers_are_recomputed_only_if_asked_for(config_file, tmp_path, wanted):
    run = briefly(config_file, tmp_path, f"run.activation_checkpointing={str(wanted).lower()}", "run.steps=1")
    layers = [module for module in run.trainer.program.objective.modules() if isinstance(module, Block)]
    assert {layer.checkpointing for layer in layers} == {wanted}


@shows("run.minutes")
def test_a_run_of_minutes_ends_by_the_clock_its_rate_at_zero_and_counts_those_before_an_interruption(
    config_file, tmp_path
):
    run = "run={steps: 2, minutes: 1, log_every: 1, mixed_precision: 'no'}"
    falling = "optimizer={learning_rate: 0.01, warmup_steps: 1, decay_share: 1.0}"
    config = load_config(config_file, [run, falling, "data.dev=[]"])

    def trainer() -> Trainer:
        return Trainer(config, TextProgram, tmp_path, clock=count(step=3).__next__)  # of 3 seconds a step

    stopped = trainer()
    out_of_time = iter([False] * 4)
    stopped._out_of_time = lambda *_: next(out_of_time, True)
    stopped.run()
    assert (stopped.step, stopped.seconds) == (4, 12)
    resumed = trainer()
    resumed.run()
    assert (resumed.step, resumed.seconds) == (20, 60)
    rates = [json.loads(line)["rate"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rates == pytest.approx([0.01 * left / 60 for left in range(60, 0, -3)])


def test_a_resumed_run_goes_on_with_the_rows_and_depths_after_its_checkpoint(
    watched, config_file, dev_shards, tmp_path
):
    settings = [*SETTINGS, f"data.dev=[{dev_shards}]"]
    stopped = Trainer(load_config(config_file, settings), TextProgram, tmp_path)
    out_of_time = iter([False] * 5)
    stopped._out_of_time = lambda *_: next(out_of_time, True)
    stopped.run()
    resumed = Watched(config_file, tmp_path, settings)
    whole, rest = watched.training_steps(), resumed.training_steps()
    assert len(rest) == 3
    for expected, found in zip(whole[5:], rest, strict=True):
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a.batch.tokens, b.batch.tokens)
            assert a.depth.loops == b.depth.loops
    for name, after in watched.updates[-1].after.items():
        torch.testing.assert_close(resumed.updates[-1].after[name], after, atol=1e-6, rtol=1e-5)


@shows("batch.rows", "batch.tokens")
@pytest.mark.parametrize(("rows", "tokens"), [(4, 64), (9, 64), (2, 1500)])
def test_a_step_takes_rows_until_it_has_enough_of_them_and_enough_tokens(config_file, rows, tokens):
    program = program_of(config_file, f"batch={{rows: {rows}, tokens: {tokens}, micro_batches: 1}}")
    for planned, _ in islice(program.train_stream.steps(LoaderState()), 5):
        sizes = [len(row.row) for row in planned]
        assert len(sizes) >= rows
        assert sum(sizes) >= tokens
        assert len(sizes) == rows or sum(sizes[:-1]) < tokens  # none too many


@shows("batch.micro_batches")
def test_the_gradient_of_a_step_does_not_depend_on_its_micro_batches(config_file, tmp_path):
    def run(micro_batches: int) -> Watched:
        batch = f"batch={{rows: 7, tokens: 64, micro_batches: {micro_batches}}}"
        return briefly(config_file, tmp_path / str(micro_batches), batch, "run.steps=1", "optimizer.clip_norm=1e6")

    whole, cut = run(1), run(3)
    assert [len(step) for run in (whole, cut) for step in run.training_steps()] == [1, 3]
    targets = sum(forward.batch.targets for forward in cut.forwards)
    assert [forward.normaliser for forward in (*whole.forwards, *cut.forwards)] == [targets] * 4
    for name, gradient in whole.gradient(0).items():
        torch.testing.assert_close(
            cut.gradient(0)[name], gradient, atol=1e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert cut.records("train")[0]["loss"] == pytest.approx(whole.records("train")[0]["loss"], rel=1e-5)
