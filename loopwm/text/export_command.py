"""Export a checkpoint of a text run as a model to serve and evaluate, while the run continues.

loopwm export --checkpoint runs/mine/checkpoints/step-00000400 --out runs/mine-400
"""

from __future__ import annotations

from pathlib import Path

from loopwm.records.command import doc_parser, exit_status


def main(arguments: list[str] | None = None) -> int:
    parser = doc_parser("loopwm export", __doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder in a run's checkpoints/")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    args = parser.parse_args(arguments)
    from loopwm.text.training.export import export_checkpoint  # brings torch: seconds

    return exit_status(lambda: export_checkpoint(args.checkpoint, args.out))
