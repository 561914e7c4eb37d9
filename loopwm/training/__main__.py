"""python -m loopwm.training: train a world model, or an agent in one, from a YAML configuration.

On a small machine, with shards made by `python -m data_prep tokenize`:

    accelerate launch -m loopwm.training --config configs/text-small.yaml --out runs/try \\
        model.preset=tiny run.steps=20 data.train='[data/shards/scienceworld-train]'
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from loopwm.pixel.registry import AGENTS
from loopwm.pixel.registry import SYSTEMS as PIXEL_SYSTEMS
from loopwm.records.command import doc_parser, exit_status, missing_package
from loopwm.records.config import read_sections, typed
from loopwm.records.errors import InputError
from loopwm.runtime import keep_everything, quick_products
from loopwm.text.training.config import TrainingConfig

# Import torch late: it takes seconds, and a bad configuration should fail at once.


class Training(Protocol):
    """A run in its folder, resumed if it was interrupted."""

    def run(self, max_minutes: float | None) -> None: ...


Sections = dict[str, Any]


def _text(sections: Sections, folder: Path, start_from: Path | None) -> Training:
    config = typed(TrainingConfig, sections)
    from loopwm.text.training.program import TextProgram
    from loopwm.trainer.trainer import Trainer

    return Trainer(config, TextProgram, folder, start_from)


def _pixels(sections: Sections, folder: Path, start_from: Path | None) -> Training:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise InputError("system: must be text with FSDP; launch with configs/accelerate/ddp.yaml")
    from loopwm.pixel import training_config as pixel
    from loopwm.pixel.program import PixelProgram
    from loopwm.trainer.trainer import Trainer

    return Trainer(pixel.training_config(sections), PixelProgram, folder, start_from)


def _agent(sections: Sections, folder: Path, start_from: Path | None) -> Training:
    if start_from is not None:
        raise InputError("--start-from: of an agent, world.start_from names the checkpoint of its world")
    from loopwm.pixel.agents.agent_trainer import AgentTrainer
    from loopwm.pixel.agents.config import agent_config
    from loopwm.pixel.gym import real_environments

    config = agent_config(sections)
    env, space = real_environments(config.real.environment, config.real.count)
    return AgentTrainer(config, env, space, folder)


SYSTEMS = {"text": _text} | dict.fromkeys(PIXEL_SYSTEMS, _pixels) | dict.fromkeys(AGENTS, _agent)
"""Builders of a run from its sections, by the configuration's `system`."""

PRODUCTS = {"text": quick_products}
"""Systems with a matrix product library other than torch's default. The pixel systems would train at half their rate:
they are mostly short attention, whose backward pass `attention_products` does not cover.
"""


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser("python -m loopwm.training", __doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see configs/")
    parser.add_argument("--out", type=Path, required=True, help="run folder; an interrupted run in it is resumed")
    parser.add_argument("--start-from", type=Path, help="checkpoint of another run that a fresh one goes on from")
    parser.add_argument("--max-minutes", type=float, help="save, export and stop after this time")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")
    arguments = parser.parse_intermixed_args(argv)
    try:
        return exit_status(lambda: _train(arguments))
    except ModuleNotFoundError as error:
        return missing_package(error, "train,pixel")


def _train(arguments: argparse.Namespace) -> None:
    sections = read_sections(arguments.config, arguments.overrides)
    system = sections.get("system", "text")
    if system not in SYSTEMS:
        raise InputError(f"system: {system!r} is not one of {', '.join(SYSTEMS)}")
    keep_everything()
    # TensorBoard's thread fails on a full disk; the main thread raises its error again, as one line.
    threading.excepthook = lambda args: None if args.exc_type is OSError else threading.__excepthook__(args)
    with PRODUCTS.get(system, nullcontext)():
        SYSTEMS[system](sections, arguments.out, arguments.start_from).run(arguments.max_minutes)


if __name__ == "__main__":
    sys.exit(main())
