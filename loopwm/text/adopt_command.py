"""Convert a pretrained decoder (Qwen3, Llama) to a looped world model, to be trained on worlds.

    loopwm adopt Qwen3-0.6B --out runs/adopted --prelude 4 --block 8 --coda 4

Its first layers become the prelude, layers from its middle the looped block, its last layers the coda.
"""

from __future__ import annotations

from pathlib import Path

from loopwm.records.command import doc_parser, exit_status


def main(arguments: list[str] | None = None) -> int:
    parser = doc_parser("loopwm adopt", __doc__)
    parser.add_argument("decoder", type=Path, metavar="FOLDER", help="config.json, tokenizer.json and safetensors")
    parser.add_argument("--out", type=Path, required=True, metavar="CHECKPOINT", help="folder to write")
    for part, where in (("prelude", "first"), ("block", "middle"), ("coda", "last")):
        help_text = f"number of its {where} layers to take"
        parser.add_argument(f"--{part}", dest=f"{part}_layers", type=int, required=True, metavar="N", help=help_text)
    args = parser.parse_args(arguments)
    from transformers.utils import logging  # brings torch: seconds

    from loopwm.text.adopt import adopt

    logging.set_verbosity_error()  # bad input is one line
    logging.disable_progress_bar()
    return exit_status(lambda: adopt(args.decoder, args.out, args.prelude_layers, args.block_layers, args.coda_layers))
