"""python -m loopwm.training: trains a world model from a YAML configuration.

On a small machine, with shards made by `python -m data_prep tokenize`:

    accelerate launch -m loopwm.training --config configs/text-small.yaml --out runs/try \\
        model.preset=tiny run.steps=20 data.train='[data/shards/scienceworld-train]'
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loopwm.training.config import ConfigError, load_config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loopwm.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see configs/")
    parser.add_argument("--out", type=Path, required=True, help="run folder; an interrupted run in it is resumed")
    parser.add_argument("--max-minutes", type=float, help="save, export and stop after this time")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        from loopwm.training.text import TextProgram
        from loopwm.training.trainer import Trainer  # torch takes seconds to import; bad arguments should not

        Trainer(config, TextProgram, arguments.out).run(arguments.max_minutes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
