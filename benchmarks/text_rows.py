"""A training pass over rows: branches that attend to what they see, against one dense mask over the row.

    OMP_NUM_THREADS=1 python benchmarks/text_rows.py --config configs/text-small.yaml --steps 4

Both ways take turns on the same micro-batches, depths and noise; the largest difference of their losses is printed. The
last line says what share of a pass reads the state out (coda, copy attention, logits of the targets). The keys of the
copy attention are outputs of the coda, so that every column a target may copy from has to be read out.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from loopwm.core import quick_products
from loopwm.text.modeling import LoopWMForCausalLM
from loopwm.text.rows import Cursor
from loopwm.text.stages import one_pass_mask, row_mask
from loopwm.text.training import TextProgram
from loopwm.text.training_config import load_config
from loopwm.text.tree import IGNORED
from loopwm.text.tree_attention import BranchMask, TreeMask
from loopwm.text.tree_batch import TreeBatch


def loss_of(model: LoopWMForCausalLM, hidden: Tensor, batch: TreeBatch) -> Tensor:
    wanted = batch.label != IGNORED
    return F.cross_entropy(model.lm_head(hidden[wanted]), batch.label[wanted])


def timed_pass(program: TextProgram, batch: TreeBatch, mask: TreeMask | BranchMask) -> tuple[float, float, float]:
    """CPU seconds of forward and backward, those of reading out alone, and the loss."""
    model = program.objective.model
    plan = program.depth_plan(0, batch)
    started = time.process_time()
    out = model.model(batch.tokens, mask, batch.positions, use_cache=False, depth=plan)
    loss = loss_of(model, out.last_hidden_state, batch)
    loss.backward()
    whole = time.process_time() - started
    state = out.state.detach().requires_grad_()
    started = time.process_time()
    loss_of(model, model.model.read_out(state, batch.tokens, mask, batch.positions), batch).backward()
    return whole, time.process_time() - started, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps whose rows are taken")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    program = TextProgram(load_config(arguments.config, arguments.overrides))
    for parameter in program.objective.model.parameters():
        if not parameter.any():  # fresh output projections, behind which no difference of attention would show
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    groups = [group for group, _ in islice(program.global_batches(Cursor()), arguments.steps)]
    batches = [batch for group in groups for batch in group]
    tokens = sum(int((batch.branch >= 0).sum()) for batch in batches)
    transitions = sum(len(batch.trunk_steps.row) for batch in batches)
    seconds, read_out, worst = {"dense": 0.0, "branches": 0.0}, 0.0, 0.0
    with quick_products():
        timed_pass(program, batches[0], row_mask(program.model_config, batches[0]))
        for batch in batches:
            dense, _, expected = timed_pass(program, batch, row_mask(program.model_config, batch))
            whole, end, loss = timed_pass(program, batch, one_pass_mask(program.model_config, batch))
            seconds["dense"] += dense
            seconds["branches"] += whole
            read_out += end
            worst = max(worst, abs(loss - expected))
    print(f"{len(batches)} micro-batches, {tokens} tokens, largest difference of losses {worst:.1e}")
    for name, spent in seconds.items():
        print(f"{name}: {tokens / spent:.0f} tokens/s, {transitions / spent:.1f} transitions/s")
    ratio = seconds["dense"] / seconds["branches"]
    print(f"ratio {ratio:.2f}; read-out {read_out / seconds['branches']:.0%} of a pass")


if __name__ == "__main__":
    main()
