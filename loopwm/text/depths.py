"""Teacher-forced loss of a checkpoint on the dev shards at T = 1 .. 2 mu_rec loops.

python -m loopwm.text.depths --config configs/text-small.yaml --model loopwm/pretrained
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from loopwm.records.command import exit_status, script_parser
from loopwm.text.checkpoint import load_checkpoint
from loopwm.text.objective import TextObjective
from loopwm.text.training import TextProgram
from loopwm.text.training_config import load_config
from loopwm.text.tree_batch import TreeBatch


@torch.inference_mode()
def dev_loss(objective: TextObjective, batches: Sequence[TreeBatch], depth: int) -> dict[int, float]:
    """Mean loss in nats a token by horizon (0: the trunk), and over all targets under -1."""
    sums = [objective(batch, depth, 1.0)[1] for batch in batches]
    loss = torch.stack([s["loss"] for s in sums]).sum(0)
    targets = torch.stack([s["targets"] for s in sums]).sum(0)
    used = torch.nonzero(targets).flatten().tolist()
    return {k: (loss[k] / targets[k]).item() for k in used} | {-1: (loss.sum() / targets.sum()).item()}


def run(config: Path, overrides: Sequence[str], checkpoint: Path) -> None:
    """Prints a line a depth. Raises InputError."""
    program = TextProgram(load_config(config, overrides))
    model, _ = load_checkpoint(checkpoint)
    batches = [batch.rows for batch in program.evaluation_batches()]
    for depth in range(1, round(2 * model.config.mu_rec) + 1):
        by_horizon = dev_loss(TextObjective(model.eval()), batches, depth)
        overall = by_horizon.pop(-1)
        print(f"T={depth}  {overall:.4f}  " + "  ".join(f"k={k} {loss:.4f}" for k, loss in by_horizon.items()))


def main(argv: list[str] | None = None) -> int:
    parser = script_parser("loopwm.text.depths", __doc__)
    parser.add_argument("--config", type=Path, required=True, help="training configuration with data.dev")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: run(arguments.config, arguments.overrides, arguments.model))


if __name__ == "__main__":
    sys.exit(main())
