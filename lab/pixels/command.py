"""Measure one property of a pixel world or of an agent trained in it, or draw it.

`accuracy` trains TWISTED by a protocol and counts exactly predicted frames by decoder, `looping` trains agents with
loops and without; rerun the command to resume it. `play` reports returns in the real environment, beside random
play. `rollout-curve` compares imagined with real play of an agent by rollout step, `reality-gap` over whole rollouts,
and `calibration` the chances of events in a world with those of the game. `filmstrip` and `film` show imagined beside
real frames of an episode, for instance one written by `record`; `curve` plots learning curves. `atari` computes
human-normalised scores of results of `play`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lab.pixels.picture_tasks import Tasks, add_pictures, add_task, write_rows, yaml_section
from loopwm.records.command import positive
from loopwm.records.files import write_json

EXAMPLE = "python -m lab pixels accuracy --out runs/studies/twisted-accuracy"
PROTOCOL = Path("configs/studies/twisted-accuracy.yaml")
CLAIMS = Path("configs/studies/storm-claims.yaml")
LOOPING = Path("configs/studies/looping-catch.yaml")
SAMPLING = "section `sampling` of all models as YAML (default: the system's)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    _add_training_studies(tasks)
    _add_memory_studies(tasks)
    _add_probes(tasks)
    add_pictures(tasks)


def run(args: argparse.Namespace) -> None:
    args.work(args)


def _add_training_studies(tasks: Tasks) -> None:
    """Add studies that train models by a protocol."""
    purpose = "exact next frames by decoder, of models trained by a protocol"
    accuracy = add_task(tasks, "accuracy", _accuracy, purpose, "folder of the study")
    accuracy.add_argument("--protocol", type=Path, default=PROTOCOL, help="default: %(default)s")
    accuracy.add_argument("--workers", type=positive, default=1, help="parallel runs (default: 1)")
    accuracy.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the protocol: seeds=[0]")
    purpose = "measure STORM worlds trained by a protocol against thresholds fixed in advance"
    claims = add_task(tasks, "paper-claims", _claims, purpose, "folder of the study")
    claims.add_argument("--protocol", type=Path, default=CLAIMS, help="default: %(default)s")
    claims.add_argument("--workers", type=positive, default=1, help="parallel runs (default: 1)")
    claims.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the protocol: seeds=[0]")
    purpose = "frames of agents' worlds: looped, the same layers once, and as many layers as run"
    looping = add_task(tasks, "looping", _looping, purpose, "folder of the study")
    looping.add_argument("--protocol", type=Path, default=LOOPING, help="default: %(default)s")
    looping.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the protocol: seeds=[0]")


def _add_memory_studies(tasks: Tasks) -> None:
    """Add studies of memories."""
    purpose = "memory modules alone: accuracy of a cue after a delay"
    memory = add_task(tasks, "memory", _memory, purpose, "folder of the study")
    memory.add_argument("--steps", type=positive, default=400, help="training steps (default: %(default)s)")
    memory.add_argument("--seeds", type=positive, default=3, help="default: %(default)s")
    purpose = "cue accuracy of imagined mazes after waiting (MiniGrid's Memory mazes)"
    recall = add_task(tasks, "memory-recall", _recall, purpose, "folder of the study")
    recall.add_argument(
        "models", nargs="+", type=_named, metavar="NAME=DIR", help="checkpoint folders with their names"
    )
    recall.add_argument("--environment", default="minigrid/MemoryS7@pixels=32", help="default: %(default)s")
    recall.add_argument("--mazes", type=positive, default=500, help="valid mazes (default: %(default)s)")
    recall.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    recall.add_argument("--sampling", type=yaml_section, default={}, metavar="{KEY: VALUE}", help=SAMPLING)
    purpose = "prediction of the rewarded turn at a corridor's end (MiniGrid's Memory mazes)"
    choice = add_task(tasks, "memory-choice", _choice, purpose, "folder of the study")
    choice.add_argument(
        "models", nargs="+", type=_named, metavar="NAME=DIR", help="checkpoint folders with their names"
    )
    choice.add_argument("--frames", type=Path, required=True, help="held-out episodes of the policy choose")
    choice.add_argument(
        "--episodes", type=positive, default=500, help="episodes that end in a choice (default: %(default)s)"
    )
    choice.add_argument(
        "--futures", type=positive, default=8, help="imagined futures per episode (default: %(default)s)"
    )
    choice.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    choice.add_argument("--sampling", type=yaml_section, default={}, metavar="{KEY: VALUE}", help=SAMPLING)


def _add_probes(tasks: Tasks) -> None:
    """Add measurements of a trained agent or world."""
    purpose = "returns of an agent and of random play in the real environment, and Crafter score"
    play = add_task(tasks, "play", _play, purpose, "file of results")
    play.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    play.add_argument("--episodes", type=positive, default=100, help="default: %(default)s")
    play.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    purpose = "imagined against real drift of a ball (STORM on catch-drift)"
    calibration = add_task(tasks, "calibration", _calibration, purpose, "file of results")
    calibration.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    calibration.add_argument("--worlds", type=positive, default=300, help="worlds per start (default: %(default)s)")
    calibration.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    purpose = "imagined against real rewards, ends and objects by rollout step"
    curve = add_task(tasks, "rollout-curve", _rollout_curve, purpose, "file of results")
    curve.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    curve.add_argument("--rollouts", type=positive, default=500, help="default: %(default)s")
    curve.add_argument("--steps", type=positive, default=16, help="steps of a rollout (default: %(default)s)")
    curve.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    purpose = "package an agent's world for loopwm.pixel.gym, with a card of its errors by imagined age"
    package = add_task(tasks, "package", _package, purpose, "checkpoint folder to write")
    package.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    package.add_argument("--starts", type=positive, default=32, help="episodes to start in (default: %(default)s)")
    purpose = "package a world without an agent, with a card of recorded play"
    recorded = add_task(tasks, "package-recorded", _package_recorded, purpose, "checkpoint folder to write")
    recorded.add_argument("--model", type=Path, required=True, help="checkpoint folder of the world")
    recorded.add_argument("--frames", type=Path, required=True, help="held-out episodes")
    recorded.add_argument("--starts", type=positive, default=16, help="episodes to start in (default: %(default)s)")
    recorded.add_argument("--sampling", type=yaml_section, default={}, metavar="{KEY: VALUE}", help=SAMPLING)
    purpose = "write the card of a packaged world again, measured with the agent of any run of its environment"
    card = add_task(tasks, "card", _card, purpose, "checkpoint folder of the world")
    card.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a run of an agent")
    for task in (package, recorded, card):
        task.add_argument("--rollouts", type=positive, default=2000, help="of each policy (default: %(default)s)")
        task.add_argument("--steps", type=positive, default=8, help="steps of a rollout (default: %(default)s)")
        task.add_argument("--seed", type=int, default=1000, help="default: %(default)s")
    oracle = add_task(tasks, "oracle", _oracle, "train an agent in the simulator instead of a world", "run folder")
    oracle.add_argument("--config", type=Path, required=True, help="YAML file, see configs/studies/oracle-catch.yaml")
    oracle.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the configuration")
    purpose = "rewards and ends of imagined and real rollouts of an agent and of random play"
    gap = add_task(tasks, "reality-gap", _reality_gap, purpose, "file of results")
    gap.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    gap.add_argument("--rollouts", type=positive, default=10, help="default: %(default)s")
    gap.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    purpose = "human-normalised Atari 100k scores of results written by `lab pixels play`"
    atari = add_task(tasks, "atari", _atari, purpose, "file of results")
    atari.add_argument(
        "played", nargs="+", type=Path, metavar="PLAY.json", help="results of `play`, the same number of runs per game"
    )
    atari.add_argument("--intervals", action="store_true", help="95 %% intervals (extra: rliable)")
    atari.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"must be NAME=DIR, got {text!r}")
    return name, Path(folder)


# The tasks import lazily: torch takes seconds to import, and `--help` needs none of it.


def _accuracy(args: argparse.Namespace) -> None:
    from lab.pixels.accuracy_protocol import AccuracyProtocol
    from lab.pixels.accuracy_study import run_accuracy_study
    from lab.studies.study_protocol import load_protocol

    run_accuracy_study(load_protocol(AccuracyProtocol, args.protocol, args.overrides), args.out, args.workers)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def _claims(args: argparse.Namespace) -> None:
    from lab.pixels.paper_claims_study import ClaimsProtocol, run_claims_study
    from lab.studies.study_protocol import load_protocol

    run_claims_study(load_protocol(ClaimsProtocol, args.protocol, args.overrides), args.out, args.workers)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def _looping(args: argparse.Namespace) -> None:
    from lab.pixels.looping_study import LoopingProtocol, run_looping_study
    from lab.studies.study_protocol import load_protocol

    run_looping_study(load_protocol(LoopingProtocol, args.protocol, args.overrides), args.out)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def _memory(args: argparse.Namespace) -> None:
    from lab.pixels.cue_memory import Settings, run_study

    run_study(args.out, Settings(steps=args.steps, seeds=tuple(range(args.seeds))))
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def _recall(args: argparse.Namespace) -> None:
    from lab.pixels.memory_recall import run_study

    run_study(dict(args.models), args.environment, args.mazes, args.seed, args.sampling, args.out)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def _choice(args: argparse.Namespace) -> None:
    from lab.pixels.memory_choice import run_study

    run_study(dict(args.models), args.frames, args.episodes, args.futures, args.seed, args.sampling, args.out)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def _play(args: argparse.Namespace) -> None:
    from lab.pixels.playing import evaluate

    results = evaluate(args.folder, args.episodes, args.seed)
    write_json(args.out, results)
    print(json.dumps(results, indent=1))


def _calibration(args: argparse.Namespace) -> None:
    from lab.pixels.calibration import measure

    write_rows(args.out, measure(args.model, args.worlds, args.seed))


def _rollout_curve(args: argparse.Namespace) -> None:
    from lab.pixels.rollout_curve import measure

    write_rows(args.out, measure(args.folder, args.rollouts, args.steps, args.seed))


def _package(args: argparse.Namespace) -> None:
    from lab.pixels.packaged_world import package

    card = package(args.folder, args.out, args.starts, args.rollouts, args.steps, args.seed)
    print(json.dumps(card, indent=1))


def _package_recorded(args: argparse.Namespace) -> None:
    from lab.pixels.packaged_world import package_recorded

    plan = args.starts, args.rollouts, args.steps, args.sampling, args.seed
    print(json.dumps(package_recorded(args.model, args.frames, args.out, *plan), indent=1))


def _card(args: argparse.Namespace) -> None:
    from lab.pixels.packaged_world import write_card

    print(json.dumps(write_card(args.folder, args.out, args.rollouts, args.steps, args.seed), indent=1))


def _reality_gap(args: argparse.Namespace) -> None:
    from lab.pixels.reality_gap import measure

    results = measure(args.folder, args.rollouts, args.seed)
    write_json(args.out, results)
    print(json.dumps(results, indent=1))


def _oracle(args: argparse.Namespace) -> None:
    from lab.pixels.oracle import train

    train(args.config, args.overrides, args.out)


def _atari(args: argparse.Namespace) -> None:
    from lab.pixels.atari import measure

    results = measure(args.played, args.intervals, args.seed)
    write_rows(args.out, results)
    print(" ".join(f"{name} {number:.3f}" for name, number in results["overall"].items()))
