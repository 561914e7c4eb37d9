"""python -m loopwm.training: trains a world model, of text or of pixels, from a YAML configuration.

On a small machine, with shards made by `python -m data_prep tokenize`:

    accelerate launch -m loopwm.training --config configs/text-small.yaml --out runs/try \\
        model.preset=tiny run.steps=20 data.train='[data/shards/scienceworld-train]'
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loopwm.training.config import ConfigError, TrainingConfig, read_sections, typed

# torch takes seconds to import; a bad configuration of the main job should not wait for it.


def _text(sections: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    config = typed(TrainingConfig, sections)
    from loopwm.training.text import TextProgram

    return config, TextProgram


def _twisted(sections: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    from loopwm.training.twisted_config import TwistedTrainingConfig

    config = typed(TwistedTrainingConfig, sections)
    from loopwm.training.twisted import TwistedProgram

    return config, TwistedProgram


SYSTEMS = {"text": _text, "twisted": _twisted}
"""By the configuration's `system`: what turns its sections into a configuration, with the program that takes it."""


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
        sections = read_sections(arguments.config, arguments.overrides)
        system = sections.get("system", "text")
        if system not in SYSTEMS:
            raise ConfigError(f"system: {system!r} is not one of {', '.join(SYSTEMS)}")
        config, program = SYSTEMS[system](sections)
        from loopwm.training.trainer import Trainer

        Trainer(config, program, arguments.out).run(arguments.max_minutes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
