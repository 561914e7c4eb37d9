"""Every key of a text run's configuration does what it says, from the file to what reaches model and optimisers.

`shows` names the keys that a test is about; a key without a test is a failure.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from loopwm.core import DepthPlan
from loopwm.records.errors import InputError
from loopwm.text import objective
from loopwm.text.configuration import LoopWMConfig
from loopwm.text.integers import fourier_features, integer_tokens
from loopwm.text.modeling import LoopWMForCausalLM
from loopwm.text.objective import TextObjective
from loopwm.text.rows import Cursor, PlannedRow
from loopwm.text.tokenizer import load_tokenizer
from loopwm.text.training import TextProgram, export_model
from loopwm.text.training_config import TrainingConfig, load_config
from loopwm.text.tree import IGNORED
from loopwm.text.tree_batch import TreeBatch
from loopwm.trainer.trainer import Trainer
from loopwm.training.__main__ import main
from tests.training.conftest import toy_episode, write_toy_shards

SHOWN: set[str] = set()
"""Keys that some test is about."""


def shows(*keys: str) -> Callable[[Any], Any]:
    SHOWN.update(keys)
    return lambda test: test


def test_every_key_has_a_test_of_its_consequence():
    keys = {"system"}
    for section, kind in get_type_hints(TrainingConfig).items():
        if dataclasses.is_dataclass(kind):
            keys |= {f"{section}.{field.name}" for field in dataclasses.fields(kind)}
    assert keys == SHOWN


# -- what a run does, from outside ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Forward:
    """A call of the objective; depth: what the core was told."""

    training: bool
    batch: TreeBatch
    depth: DepthPlan | int
    normaliser: float


@dataclasses.dataclass
class Update:
    """A step of one optimiser. before, gradient, after: of its parameters by name; groups: its settings."""

    kind: str
    groups: list[dict[str, Any]]
    before: dict[str, Tensor]
    gradient: dict[str, Tensor]
    after: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)


class Watched:
    """A run with everything that passes through its objective and its optimisers."""

    def __init__(self, config_file: Path, folder: Path, overrides: Sequence[str]) -> None:
        self.folder = folder
        self.forwards: list[Forward] = []
        self.updates: list[Update] = []
        self.trainer = Trainer(load_config(config_file, overrides), TextProgram, folder)
        self.names = {id(p): name for name, p in self.trainer.objective.named_parameters()}
        with self._watching():
            self.trainer.run()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        forward = TextObjective.forward

        def watched(objective, batch, depth, normaliser):
            self.forwards.append(Forward(objective.training, batch, depth, normaliser))
            return forward(objective, batch, depth, normaliser)

        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TextObjective, "forward", watched)
            yield
        for hook in hooks:
            hook.remove()

    def _parameters(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return {self.names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}

    def _before(self, optimizer, *_: Any) -> None:
        parameters = self._parameters(optimizer)
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"names": {self.names[id(p)] for p in group["params"]}}
            for group in optimizer.param_groups
        ]
        before = {name: p.detach().clone() for name, p in parameters.items()}
        gradient = {name: p.grad.clone() for name, p in parameters.items()}
        self.updates.append(Update(type(optimizer).__name__, groups, before, gradient))

    def _after(self, optimizer, *_: Any) -> None:
        parameters, update = self._parameters(optimizer), self.updates[-1]
        update.after = {name: p.detach().clone() for name, p in parameters.items()}
        kept = {name: optimizer.state[p] for name, p in parameters.items()}
        update.state = {name: {k: v.clone() for k, v in s.items() if torch.is_tensor(v)} for name, s in kept.items()}

    def steps_of(self, kind: str) -> list[Update]:
        return [update for update in self.updates if update.kind == kind]

    def gradient(self, step: int) -> dict[str, Tensor]:
        """Of all parameters, as the optimisers saw it."""
        kinds = {update.kind for update in self.updates}
        return {name: g for kind in kinds for name, g in self.steps_of(kind)[step].gradient.items()}

    def records(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def training_steps(self) -> list[list[Forward]]:
        """The forwards of each optimiser step."""
        size = self.trainer.program.micro_batches
        trained = [forward for forward in self.forwards if forward.training]
        return [trained[i : i + size] for i in range(0, len(trained), size)]


RATES = [1 / 3, 2 / 3, 1, 1, 1, 0.75, 0.5, 0.25]
"""Shares of the rate by the settings below."""

SETTINGS = [
    "model.overrides={mu_rec: 4.0, default_depth: 3}",
    "optimizer={learning_rate: 0.01, weight_decay: 0.3, beta1: 0.8, beta2: 0.7, momentum: 0.6, clip_norm: 0.05, "
    "warmup_steps: 3, decay_share: 0.5}",
    "depth={backward_loops: 3, ramp_start: 2, ramp_steps: 4}",
    "run={steps: 8, seed: 5, mixed_precision: 'no', log_every: 2, eval_every: 4, eval_batches: 3, save_every: 3, "
    "keep_checkpoints: 3}",
    "batch={rows: 6, tokens: 64, micro_batches: 2}",
]
"""All of them other than the defaults."""


@pytest.fixture(scope="module")
def dev_shards(tmp_path_factory) -> Path:
    """Episodes with a goal of their own."""
    out = tmp_path_factory.mktemp("dev")
    episodes = (dataclasses.replace(toy_episode(i), goal="stand still") for i in range(100, 110))
    write_toy_shards(out, episodes)
    return out


@pytest.fixture(scope="module")
def watched(config_file, dev_shards, one_thread, tmp_path_factory) -> Watched:
    return Watched(config_file, tmp_path_factory.mktemp("runs") / "watched", [*SETTINGS, f"data.dev=[{dev_shards}]"])


def briefly(config_file: Path, folder: Path, *overrides: str) -> Watched:
    """A run of a few small steps."""
    small = ["batch={rows: 3, tokens: 64, micro_batches: 1}", "data.dev=[]", "run.steps=2"]
    return Watched(config_file, folder, [*small, *overrides])


def program_of(config_file: Path, *overrides: str) -> TextProgram:
    return TextProgram(load_config(config_file, overrides))


# -- optimizer -----------------------------------------------------------------------------------------------------


@shows("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.decay_share", "run.steps")
def test_every_group_of_every_optimiser_steps_at_the_rate_of_the_schedule(watched):
    assert {update.kind for update in watched.updates} == {"Muon", "AdamW"}
    for kind in ("Muon", "AdamW"):
        for update, share in zip(watched.steps_of(kind), RATES, strict=True):
            assert [group["lr"] for group in update.groups] == pytest.approx([0.01 * share] * len(update.groups))


@shows("optimizer.clip_norm")
def test_no_gradient_is_longer_than_clip_norm_and_a_shorter_one_is_left_alone(watched, config_file, tmp_path):
    for step in range(8):
        norm = math.sqrt(sum(float(g.square().sum()) for g in watched.gradient(step).values()))
        assert norm == pytest.approx(0.05, rel=1e-3)
    assert min(record["grad_norm"] for record in watched.records("train")) > 0.1
    free = briefly(config_file, tmp_path / "free", "optimizer.clip_norm=1e6")
    for step, record in enumerate(free.records("train")):
        norm = math.sqrt(sum(float(g.square().sum()) for g in free.gradient(step).values()))
        assert norm == pytest.approx(record["grad_norm"], rel=1e-4)


def adamw(update: Update, past: Sequence[Update], beta1: float, beta2: float, decay: float) -> dict[str, Tensor]:
    """Where a step of AdamW leads to (Loshchilov and Hutter), by the gradients of all steps so far."""
    out = {}
    rate, steps = update.groups[0]["lr"], [*past, update]
    for name, before in update.before.items():
        g = [step.gradient[name].double() for step in steps]
        n = len(g)
        mean = sum((1 - beta1) * beta1 ** (n - 1 - i) * x for i, x in enumerate(g)) / (1 - beta1**n)
        square = sum((1 - beta2) * beta2 ** (n - 1 - i) * x**2 for i, x in enumerate(g)) / (1 - beta2**n)
        decayed = decay if name.endswith("_proj.weight") else 0.0
        out[name] = (before * (1 - rate * decayed) - rate * mean / (square.sqrt() + 1e-10)).float()
    return out


@shows("optimizer.beta1", "optimizer.beta2")
def test_embeddings_norms_and_injection_follow_adamw_with_these_betas_and_without_decay(watched):
    steps = watched.steps_of("AdamW")
    assert "model.model.embed_tokens.weight" in steps[0].before
    assert not any(name.endswith("_proj.weight") for name in steps[0].before)
    for i in range(3):
        expected = adamw(steps[i], steps[:i], 0.8, 0.7, decay=0.0)
        for name, after in steps[i].after.items():
            torch.testing.assert_close(after, expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@shows("optimizer.name", "optimizer.weight_decay")
def test_adamw_for_all_shrinks_the_matrices_of_layers_and_nothing_else(config_file, tmp_path):
    run = briefly(config_file, tmp_path, "optimizer={name: adamw, weight_decay: 20.0, learning_rate: 0.01}")
    assert {update.kind for update in run.updates} == {"AdamW"}
    first = run.updates[0]
    assert len(first.before) == len(run.names)
    expected = adamw(first, [], 0.9, 0.95, decay=20.0)
    for name, after in first.after.items():
        torch.testing.assert_close(after, expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@shows("optimizer.momentum")
def test_muon_averages_gradients_with_this_momentum_and_decays_its_matrices(watched):
    steps = watched.steps_of("Muon")
    assert [{group["weight_decay"] for group in update.groups} for update in steps] == [{0.3}] * 8
    average = {name: torch.zeros_like(p) for name, p in steps[0].before.items()}
    for update in steps[:3]:
        for name, g in update.gradient.items():
            average[name] = 0.6 * average[name] + 0.4 * g
            torch.testing.assert_close(update.state[name]["momentum_buffer"], average[name])


@shows("optimizer.average")
def test_what_is_evaluated_and_exported_is_the_average_of_the_weights(config_file, dev_shards, tmp_path):
    more = ["optimizer.average=0.75", "run={steps: 3, eval_every: 3, eval_batches: 1, mixed_precision: 'no'}"]
    run = briefly(config_file, tmp_path, *more, f"data.dev=[{dev_shards}]")
    exported = LoopWMForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    own = run.trainer.objective.state_dict()
    moved = False
    for kind in ("Muon", "AdamW"):
        steps = run.steps_of(kind)
        for name in steps[0].after:
            average = steps[0].after[name]
            for update in steps[1:]:
                average = 0.75 * average + 0.25 * update.after[name]
            short = name.removeprefix("model.")
            torch.testing.assert_close(exported[short].float(), average.bfloat16().float(), rtol=0.02, atol=1e-4)
            torch.testing.assert_close(own[name], steps[-1].after[name])  # training goes on from its own weights
            moved |= not torch.allclose(average, steps[-1].after[name], atol=1e-3)
    assert moved
    plain = TextObjective(LoopWMForCausalLM.from_pretrained(tmp_path / "model").float()).eval()
    run.trainer.average = None
    run.trainer.objective.load_state_dict(plain.state_dict(), strict=False)
    assert run.records("dev")[0]["loss"] == pytest.approx(run.trainer.evaluate()["loss"], rel=1e-2)


# -- depth ---------------------------------------------------------------------------------------------------------


@shows("depth.ramp_start", "depth.ramp_steps", "depth.backward_loops", "run.seed")
def test_depths_grow_over_the_ramp_and_their_last_loops_carry_gradients(watched):
    means = [1.0, 1.0, 1.0, 1.75, 2.5, 3.25, 4.0, 4.0]
    longest = 0
    for step, (forwards, mean) in enumerate(zip(watched.training_steps(), means, strict=True)):
        for forward in forwards:
            assert forward.depth.mu_bwd == 3
            expected = DepthPlan.sample(5, step, forward.batch.row_ids, mean, 6)
            assert forward.depth.loops == expected.loops
            assert forward.depth.noise_seeds == expected.noise_seeds
            longest = max(longest, *forward.depth.loops)
    assert longest > 4


@shows("depth.sampling")
@pytest.mark.parametrize("sampling", ["per_sequence", "per_batch", "fixed"])
def test_rows_draw_depths_alone_together_or_not_at_all(config_file, sampling):
    program = program_of(config_file, f"depth.sampling={sampling}", "batch={rows: 24, tokens: 64, micro_batches: 4}")
    steps = islice(program.global_batches(Cursor()), 6)
    depths = [[program.depth_plan(i, batch).loops for batch in batches] for i, (batches, _) in enumerate(steps)]
    in_a_batch = max(len(set(loops)) for step in depths for loops in step)
    in_a_step = max(len({n for loops in step for n in loops}) for step in depths)
    assert (in_a_batch > 1, in_a_step > 1) == {
        "per_sequence": (True, True),
        "per_batch": (False, True),
        "fixed": (False, False),
    }[sampling]


@shows("depth.mean_rate", "depth.loop_price")
def test_a_learned_mean_moves_at_its_rate_and_falls_with_the_price_of_a_loop(config_file, tmp_path):
    def means(name: str, depth: str) -> list[float]:
        run = briefly(config_file, tmp_path / name, f"depth={depth}", "run.seed=3")
        return [record["mu_rec"] for record in run.records("train")]

    slow, fast, dear = (
        means(str(i), f"{{mean_rate: {rate}, loop_price: {price}}}")
        for i, (rate, price) in enumerate([(0.01, 0.0), (0.02, 0.0), (0.01, 5.0)])
    )
    assert slow[0] != 2.0
    assert fast[0] - 2.0 == pytest.approx(2 * (slow[0] - 2.0), rel=1e-4)
    assert dear[0] < slow[0]


# -- run -----------------------------------------------------------------------------------------------------------


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
    rows = sum(len(planned) for planned, _ in islice(stream.steps(Cursor()), 3))
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
        (batch,), _ = next(program.global_batches(Cursor()))
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


# -- batch ---------------------------------------------------------------------------------------------------------


@shows("batch.rows", "batch.tokens")
@pytest.mark.parametrize(("rows", "tokens"), [(4, 64), (9, 64), (2, 1500)])
def test_a_step_takes_rows_until_it_has_enough_of_them_and_enough_tokens(config_file, rows, tokens):
    program = program_of(config_file, f"batch={{rows: {rows}, tokens: {tokens}, micro_batches: 1}}")
    for planned, _ in islice(program.train_stream.steps(Cursor()), 5):
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


# -- data ----------------------------------------------------------------------------------------------------------


def rows_seen(program: TextProgram, steps: int = 25) -> Iterator[tuple[TreeBatch, int]]:
    """The micro-batches that reach the model, and an index of each of their rows."""
    for batches, _ in islice(program.global_batches(Cursor()), steps):
        for batch in batches:
            for row in range(len(batch.row_ids)):
                yield batch, row


def plans_seen(program: TextProgram, steps: int = 25) -> list[PlannedRow]:
    return [planned for rows, _ in islice(program.train_stream.steps(Cursor()), steps) for planned in rows]


def target_shares(pairs: Iterator[tuple[Any, int]]) -> dict[Any, float]:
    """Of keys with counts."""
    counts: Counter = Counter()
    for key, count in pairs:
        counts[key] += count
    return {key: count / counts.total() for key, count in counts.items()}


@shows("data.regimes")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_snapshots_have_their_share_of_the_targets_that_reach_the_model(config_file, share):
    program = program_of(config_file, f"data.regimes={{observed: {1 - share}, snapshot: {share}}}")
    look = load_tokenizer().convert_tokens_to_ids("<|look|>")
    found = target_shares(
        (bool((batch.tokens[row] == look).any()), int((batch.label[row] != IGNORED).sum()))
        for batch, row in rows_seen(program)
    )
    assert found.get(True, 0.0) == pytest.approx(share, abs=0.05)


@shows("data.trunk_tokens_max")
@pytest.mark.parametrize("limit", [90, 130])
def test_no_trunk_is_longer_than_its_limit(config_file, limit):
    data = [f"data.trunk_tokens_max={limit}", "data.trunk_tokens_min=64"]
    trunks = [int((batch.branch[row] == 0).sum()) for batch, row in rows_seen(program_of(config_file, *data))]
    assert 0.8 * limit < max(trunks) <= limit


@shows("data.trunk_tokens_min")
def test_trunks_are_cut_no_shorter_than_their_least_length_asks(config_file):
    """With equal limits every window takes what it can: episodes fall into fewer, longer rows."""
    trunks = {}
    for least in (64, 200):
        data = [f"data.trunk_tokens_min={least}", "data.trunk_tokens_max=200", "data.regimes={observed: 1}"]
        trunks[least] = [row.row.branch.count(0) for row in plans_seen(program_of(config_file, *data))]
    assert sum(trunks[200]) / len(trunks[200]) > 1.2 * sum(trunks[64]) / len(trunks[64])


@shows("data.history_share")
def test_history_before_the_first_target_takes_its_share_at_most(config_file):
    shown = {}
    for share in (0.0, 0.6):
        data = [f"data.history_share={share}", "data.regimes={observed: 1}", "data.trunk_tokens_max=150"]
        plans = [row.plan for row in plans_seen(program_of(config_file, *data))]
        shown[share] = [plan.targets_from - plan.first for plan in plans if plan.targets_from > 1]
    assert set(shown[0.0]) == {1}  # the step before always stays
    assert max(shown[0.6]) > 2


@shows("data.snapshot_steps")
@pytest.mark.parametrize("most", [1, 3])
def test_snapshots_are_followed_by_so_many_steps_at_most(config_file, most):
    program = program_of(config_file, f"data.snapshot_steps={most}", "data.trunk_tokens_min=256")
    lengths = {row.plan.last - row.plan.first + 1 for row in plans_seen(program) if row.plan.regime == "snapshot"}
    assert max(lengths) == most


@shows("data.horizon_shares")
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.6, 0.2, 0.2)])
def test_horizons_have_their_shares_of_the_targets_that_reach_the_model(config_file, shares):
    program = program_of(config_file, f"data.horizon_shares={list(shares)}")
    found = target_shares(
        (max(horizon, 1), 1)
        for batch, row in rows_seen(program)
        for horizon in batch.horizon[row][batch.label[row] != IGNORED].tolist()
    )
    assert found == pytest.approx(dict(enumerate(shares, start=1)), abs=0.05)


@shows("data.max_branches")
@pytest.mark.parametrize("most", [0, 2])
def test_rows_have_so_many_branches_at_most(config_file, most):
    program = program_of(config_file, f"data.max_branches={most}")
    assert max(int(batch.branch[row].max()) for batch, row in rows_seen(program)) == most


@shows("data.repeat_weight")
def test_branches_leave_more_often_before_repeated_actions_the_more_these_weigh(config_file):
    before_repeats = {}
    for weight in (1.0, 100.0):
        # One branch a row, so that there is something to choose.
        data = [f"data.repeat_weight={weight}", "data.max_branches=1", "data.horizon_shares=[0.5, 0.5]"]
        rows = plans_seen(program_of(config_file, *data), 40)
        repeats = [
            row.episode.actions[b.step + 1].tolist() == row.episode.actions[b.step + 2].tolist()
            for row in rows
            for b in row.plan.branches
        ]
        before_repeats[weight] = sum(repeats) / len(repeats)
    assert before_repeats[100.0] > before_repeats[1.0] + 0.2


@pytest.fixture(scope="module")
def mixed_shards(tmp_path_factory) -> Path:
    """Two worlds, and two policies in each, in equal parts."""
    out = tmp_path_factory.mktemp("mixed")
    kinds = [(env, policy) for env in ("scienceworld", "alfworld") for policy in ("random", "gold")]
    episodes = (dataclasses.replace(toy_episode(i), env=env, policy=policy) for env, policy in kinds for i in range(12))
    write_toy_shards(out, episodes)
    return out


@shows("data.envs", "data.policies")
def test_worlds_and_policies_have_their_shares_of_the_targets(config_file, mixed_shards):
    data = ["data.envs={scienceworld: 0.75, alfworld: 0.25}", "data.policies={random: 0.8, gold: 0.2}"]
    program = program_of(config_file, f"data.train=[{mixed_shards}]", *data)
    rows = plans_seen(program, 40)
    by_world = target_shares((row.episode.env, row.row.targets) for row in rows)
    by_policy = target_shares((row.episode.policy, row.row.targets) for row in rows)
    assert by_world == pytest.approx({"scienceworld": 0.75, "alfworld": 0.25}, abs=0.04)
    assert by_policy == pytest.approx({"random": 0.8, "gold": 0.2}, abs=0.04)


# -- model and objective -------------------------------------------------------------------------------------------


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
    told = capsys.readouterr().err.splitlines()
    assert [line[:22] for line in told if line.startswith("error")] == [
        "error: model.weights: ",
        "error: nowhere/config.",
    ]


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
    deepest = [int(batch.steps.deepest.max()) for (batch,), _ in islice(program.global_batches(Cursor()), 8)]
    assert deepest == [1, 1, 2, 2, 3, 3, 4, 4]


HEADS = "model.overrides={prediction_heads: true, monitor_head: true}"
GATE = "model.overrides={exit_gate: true, mu_rec: 4.0}"


def loss_of(
    config_file: Path, overrides: Sequence[str], moved: bool = True
) -> tuple[float, dict[str, Tensor], TreeBatch]:
    """Loss and measurements of the first batch, with weights away from where they start."""
    torch.manual_seed(0)
    program = program_of(config_file, "batch={rows: 3, tokens: 64, micro_batches: 1}", *overrides)
    (batch,), _ = next(program.global_batches(Cursor()))
    program.objective.remember_first_step(1e-3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in program.objective.parameters() if moved else ():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        loss, measured = program.loss(program.objective, batch, 0, 100.0)
    return loss.item(), measured, batch


@shows(
    "objective.reward_coef", "objective.continue_coef", "objective.consistency_coef", "objective.contraction_coef"
)  # fmt: skip
@pytest.mark.parametrize(
    ("key", "term"),
    [
        ("reward_coef", "reward_loss"),
        ("continue_coef", "continue_loss"),
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
    with pytest.raises(InputError, match=r"objective.integer_weights.alfworld: the shards hold scienceworld"):
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
    with pytest.raises(InputError, match=r"objective.opening_weights.alfworld: the shards hold scienceworld"):
        program_of(config_file, "objective.opening_weights={alfworld: 2.0}")


@shows("objective.exit_entropy_coef")
@pytest.mark.parametrize("coefficient", [0.5, 2.0])
def test_the_entropy_of_a_fresh_gate_is_one_bit_a_loop_and_position_times_its_coefficient(config_file, coefficient):
    entropy = [GATE, "objective.exit_loss=entropy"]
    plain, _, _ = loss_of(config_file, entropy, moved=False)
    loss, _, batch = loss_of(config_file, [*entropy, f"objective.exit_entropy_coef={coefficient}"], moved=False)
    loops = DepthPlan.sample(0, 0, batch.row_ids, 4.0, 6).loops
    positions = (batch.branch >= 0).sum(1).tolist()
    gates = sum(min(loop, 2) * count for loop, count in zip(loops, positions, strict=True))
    assert loss - plain == pytest.approx(-coefficient * math.log(2) * gates / 100, rel=1e-4)


@shows("objective.exit_loss")
def test_the_expected_loss_takes_the_place_of_the_last_one(config_file):
    last, _, _ = loss_of(config_file, [GATE, "objective.exit_loss=entropy"])
    expected, measured, batch = loss_of(config_file, [GATE, "objective.exit_loss=expected"])
    assert expected == pytest.approx(measured["expected_loss"][0].item() / 100, rel=1e-5)
    assert measured["expected_loss"][1].item() == batch.targets
    assert abs(expected - last) > 1e-5
