"""Rows packed for GPUs, and builders in processes of their own, change nothing that is learnt."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from loopwm.text.data import tree_attention
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.data.tree import IGNORED
from loopwm.text.training.program import TextProgram
from tests.training.consequences.test_data import plans_seen
from tests.training.consequences.watched import program_of, shows

EVERYTHING = (
    "batch={rows: 5, tokens: 700, micro_batches: 2}",
    "model.overrides={prediction_heads: true, monitor_head: true}",
    "objective={reward_coef: 1.0, continue_coef: 1.0, consistency_coef: 0.5, bag_coef: 0.5, state_coef: 0.5}",
    "objective.accept_coef=1.0",
    "data.query_share=0.2",
)


def test_a_plan_tells_what_its_row_will_hold(config_file):
    for planned in plans_seen(program_of(config_file, *EVERYTHING)):
        assert (planned.tokens, planned.targets) == (len(planned.row), planned.row.targets)


def gradients(program: TextProgram) -> tuple[list, dict[str, torch.Tensor]]:
    """Micro-batches of the first step, and the gradients of its loss at the default depth."""
    batches, _ = next(program.global_batches(LoaderState()))
    torch.manual_seed(2)
    for parameter in program.objective.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for batch in batches:
        program.objective(batch, 2, 100.0)[0].backward()
    return batches, {name: weight.grad for name, weight in program.objective.named_parameters()}


@shows("batch.packed")
def test_packed_rows_have_the_gradients_of_rows_apart(config_file):
    apart, expected = gradients(program_of(config_file, *EVERYTHING))
    packed, found = gradients(program_of(config_file, *EVERYTHING, "batch.packed=192"))
    assert {batch.tokens.shape for batch in packed} == {(2, 192 * round(packed[0].tokens.shape[1] / 192))}
    assert sum(batch.targets for batch in packed) == sum(batch.targets for batch in apart)
    assert sum(int((batch.start > 0).sum()) for batch in packed) > 0  # several rows a line
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


def test_packed_lines_of_several_processes_have_numbers_of_their_own(config_file):
    program = program_of(config_file, *EVERYTHING, "batch.packed=192", "batch.micro_batches=2")
    for processes in (1, 2):
        batches, _ = next(program.global_batches(LoaderState(), 0, processes))
        numbers = [number for batch in batches for number in batch.row_ids]
        assert sorted(numbers) == list(range(len(numbers)))


def test_gpu_kernel_attends_as_the_dense_mask_does(config_file):
    """FlexAttention, which a CPU runs forward only, and uncompiled; its gradients are compared where there is a GPU."""
    batches, _ = next(program_of(config_file, *EVERYTHING, "batch.packed=192").global_batches(LoaderState()))
    for batch in batches:
        dense = batch.packed_mask()
        lines, length = dense.start.shape
        visible = tree_attention._visible(dense.start, dense.limit, dense.branch, dense.decode)
        blocks = create_block_mask(visible, lines, None, length, length, "cpu")
        assert blocks.sparsity() > 0  # blocks that nobody sees are skipped
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(lines, 4, length, 16, generator=generator)
        k, v = torch.randn(2, lines, 2, length, 16, generator=generator)
        looked_up = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
        torch.testing.assert_close(looked_up, dense.attend(q, k, v), rtol=1e-5, atol=1e-5)


def test_packed_lines_have_no_other_tokens(config_file):
    program = program_of(config_file, *EVERYTHING, "batch.packed=192")
    batches, _ = next(program.global_batches(LoaderState()))
    labels = sorted(label for batch in batches for label in batch.label[batch.label != IGNORED].tolist())
    rows, _ = next(program.train_stream.steps(LoaderState()))
    assert labels == sorted(label for planned in rows for label in planned.row.label if label != IGNORED)


@shows("batch.workers")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_builders_in_processes_yield_the_same_steps_in_their_order(config_file):
    alone, shared = (program_of(config_file, *EVERYTHING, f"batch.workers={count}") for count in (0, 3))
    for (ours, after), (theirs, then) in islice(
        zip(alone.global_batches(LoaderState()), shared.global_batches(LoaderState()), strict=False), 8
    ):
        assert after == then
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.steps.state[0].weight, other.steps.state[0].weight)
