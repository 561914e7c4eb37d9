"""Measure pixel worlds.

`accuracy` trains TWISTED in several ways by a written protocol and counts frames predicted right, decoder by decoder.
Killed and started again with the same arguments it goes on where it was. `play` measures a trained agent in its real
environment, beside random play, and in its own imagination. `curve` draws what agents earned as they learned, `sheet`
what a checkpoint imagines below what really happened, `film` beside it, of an episode that `record` has an agent play.
`trust` tells by age what an agent's world makes of the agent's own play, `coin` whether chance in a world is that of
the game, `atari` scores against people's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from eval.models.options import positive
from loopwm.records.files import write_json

EXAMPLE = "python -m lab pixels accuracy --out runs/studies/twisted-accuracy"
PROTOCOL = Path("configs/studies/twisted-accuracy.yaml")
CLAIMS = Path("configs/studies/storm-claims.yaml")
SAMPLING = "section `sampling` of all models as YAML (default: the system's own)"

Work = Callable[[argparse.Namespace], None]
Tasks: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    _add_studies(tasks)
    _add_pictures(tasks)
    _add_agents(tasks)


def _add_studies(tasks: Tasks) -> None:
    """Those that train, or ask for a place in the world that was made for the question."""
    purpose = "exact next frames by decoder, of models trained as a protocol says"
    accuracy = _task(tasks, "accuracy", _accuracy, purpose, "folder of the study")
    accuracy.add_argument("--protocol", type=Path, default=PROTOCOL, help="default: %(default)s")
    accuracy.add_argument("--workers", type=positive, default=1, help="runs at a time (default: 1)")
    accuracy.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the protocol: seeds=[0]")
    purpose = "what worlds of STORM know of held-out play, trained as a protocol says, beside bars set before"
    claims = _task(tasks, "claims", _claims, purpose, "folder of the study")
    claims.add_argument("--protocol", type=Path, default=CLAIMS, help="default: %(default)s")
    claims.add_argument("--workers", type=positive, default=1, help="runs at a time (default: 1)")
    claims.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the protocol: seeds=[0]")
    purpose = "memory alone: which module still knows a cue long after"
    memory = _task(tasks, "memory", _memory, purpose, "folder of the study")
    memory.add_argument("--steps", type=positive, default=400, help="of training (default: %(default)s)")
    memory.add_argument("--seeds", type=positive, default=3, help="default: %(default)s")
    purpose = "whether imagined mazes still hold their cue after waiting (MiniGrid's Memory mazes)"
    recall = _task(tasks, "recall", _recall, purpose, "folder of the study")
    recall.add_argument("models", nargs="+", type=_named, metavar="NAME=DIR", help="checkpoints and what to call them")
    recall.add_argument("--environment", default="minigrid/MemoryS7@pixels=32", help="default: %(default)s")
    recall.add_argument("--mazes", type=positive, default=500, help="valid ones (default: %(default)s)")
    recall.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    recall.add_argument("--sampling", type=_section, default={}, metavar="{KEY: VALUE}", help=SAMPLING)
    purpose = "whether it is known at a corridor's end which way pays (MiniGrid's Memory mazes)"
    choice = _task(tasks, "choice", _choice, purpose, "folder of the study")
    choice.add_argument("models", nargs="+", type=_named, metavar="NAME=DIR", help="checkpoints and what to call them")
    choice.add_argument("--frames", type=Path, required=True, help="held-out episodes of the policy choose")
    choice.add_argument("--episodes", type=positive, default=500, help="that end in a choice (default: %(default)s)")
    choice.add_argument("--futures", type=positive, default=8, help="imagined of each (default: %(default)s)")
    choice.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    choice.add_argument("--sampling", type=_section, default={}, metavar="{KEY: VALUE}", help=SAMPLING)
    purpose = "whether an imagined ball drifts as often as a real one (STORM on catch-drift)"
    coin = _task(tasks, "coin", _coin, purpose, "file of results")
    coin.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    coin.add_argument("--worlds", type=positive, default=300, help="of each start (default: %(default)s)")
    coin.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _add_pictures(tasks: Tasks) -> None:
    purpose = "learning curves of agents: returns of real episodes over interactions"
    curve = _task(tasks, "curve", _curve, purpose, "PNG file")
    curve.add_argument("groups", nargs="+", type=_group, metavar="NAME=DIR[,DIR...]", help="runs that share a line")
    curve.add_argument("--bins", type=positive, default=40, help="points of a line (default: %(default)s)")
    purpose = "true frames above those that a checkpoint imagines, a row for each way of sampling"
    sheet = _task(tasks, "sheet", _sheet, purpose, "PNG file")
    sheet.add_argument("--every", type=positive, default=1, help="draw one frame in so many (default: 1)")
    purpose = "the same as an animation, side by side"
    film = _task(tasks, "film", _film, purpose, "GIF file")
    film.add_argument("--per-second", type=positive, default=4, help="frames (default: %(default)s)")
    for task in (sheet, film):
        _add_clip(task)


def _add_clip(task: argparse.ArgumentParser) -> None:
    task.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    task.add_argument("--episode", type=Path, required=True, help="recorded episode (.npz)")
    task.add_argument(
        "--sampling",
        action="append",
        type=_sampling,
        metavar="NAME={KEY: VALUE}",
        help="a row's name and section `sampling` as YAML; may be repeated (default: the system's own)",
    )
    task.add_argument("--start", type=positive, default=10, help="frame that imagination starts at (default: 10)")
    task.add_argument("--context", type=positive, default=5, help="frames it has seen by then (default: 5)")
    task.add_argument("--steps", type=positive, default=15, help="default: %(default)s")
    task.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _add_agents(tasks: Tasks) -> None:
    """What trained agents earn, and what their worlds are worth."""
    purpose = "returns of an agent, Crafter score, and reward in imagination against reward in play"
    play = _task(tasks, "play", _play, purpose, "file of results")
    play.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    play.add_argument("--episodes", type=positive, default=100, help="default: %(default)s")
    play.add_argument("--rollouts", type=positive, default=10, help="imagined ones (default: %(default)s)")
    play.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    record = _task(tasks, "record", _record, "an episode that an agent plays, for sheets and films", "file (.npz)")
    record.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    record.add_argument("--steps", type=positive, default=200, help="of which the longest episode (default: 200)")
    record.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    purpose = "imagined rewards, ends and objects by their age, beside the agent's real play"
    trust = _task(tasks, "trust", _trust, purpose, "file of results")
    trust.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    trust.add_argument("--stretches", type=positive, default=500, help="default: %(default)s")
    trust.add_argument("--steps", type=positive, default=16, help="of a stretch (default: %(default)s)")
    trust.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    purpose = "human-normalised scores of Atari 100k out of files that `play` wrote"
    atari = _task(tasks, "atari", _atari, purpose, "file of results")
    atari.add_argument("played", nargs="+", type=Path, metavar="PLAY.json", help="as many runs of each game")
    atari.add_argument("--intervals", action="store_true", help="95 %% intervals (extra: rliable)")
    atari.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _task(tasks: Tasks, name: str, work: Work, purpose: str, out: str) -> argparse.ArgumentParser:
    """A task that writes to `--out` and is done by `work`."""
    parser = tasks.add_parser(name, help=purpose, description=purpose)
    parser.add_argument("--out", type=Path, required=True, help=out)
    parser.set_defaults(work=work)
    return parser


def run(args: argparse.Namespace) -> None:
    args.work(args)


def _sampling(text: str) -> tuple[str, dict[str, Any]]:
    name, _, section = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME={{KEY: VALUE}}, got {text!r}")
    return name, _section(section)


def _section(text: str) -> dict[str, Any]:
    try:
        keys = yaml.safe_load(text)
    except yaml.YAMLError:
        keys = None
    if not isinstance(keys, dict):
        raise argparse.ArgumentTypeError(f"expected {{KEY: VALUE}}, got {text!r}")
    return keys


def _named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, got {text!r}")
    return name, Path(folder)


def _group(text: str) -> tuple[str, list[Path]]:
    name, _, folders = text.partition("=")
    if not name or not folders:
        raise argparse.ArgumentTypeError(f"expected NAME=DIR[,DIR...], got {text!r}")
    return name, [Path(folder) for folder in folders.split(",")]


# torch takes seconds to import.


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
    from eval.pixels.playing import evaluate

    results = evaluate(args.folder, args.episodes, args.rollouts, args.seed)
    write_json(args.out, results)
    print(json.dumps(results, indent=1))


def _record(args: argparse.Namespace) -> None:
    from eval.pixels.playing import recorded
    from loopwm.records.frames import write_episode

    episode = recorded(args.folder, args.steps, args.seed)
    write_episode(args.out, episode)
    print(f"{len(episode)} steps, return {episode.reward.sum():g}")


def _coin(args: argparse.Namespace) -> None:
    from lab.pixels.calibration import measure

    _tell(args.out, measure(args.model, args.worlds, args.seed))


def _trust(args: argparse.Namespace) -> None:
    from lab.pixels.rollout_curve import measure

    _tell(args.out, measure(args.folder, args.stretches, args.steps, args.seed))


def _atari(args: argparse.Namespace) -> None:
    from eval.pixels.atari import measure

    results = measure(args.played, args.intervals, args.seed)
    _tell(args.out, results)
    print(" ".join(f"{name} {number:.3f}" for name, number in results["overall"].items()))


def _tell(path: Path, results: dict[str, Any]) -> None:
    write_json(path, results)
    for row in results["rows"]:
        print(" ".join(f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items()))


def _curve(args: argparse.Namespace) -> None:
    from eval.pixels.curve import draw

    draw(args.out, dict(args.groups), args.bins)


def _sheet(args: argparse.Namespace) -> None:
    from eval.pixels.sheet import draw

    draw(args.out, _rows(args), args.every)


def _film(args: argparse.Namespace) -> None:
    from eval.pixels.sheet import animate

    animate(args.out, _rows(args), args.per_second)


def _rows(args: argparse.Namespace) -> dict[str, Any]:
    """True frames, and those of each way of sampling."""
    from eval.pixels.sheet import Clip, imagined, load, world_of

    clip = Clip(args.start, args.context, args.steps)
    system, episode = load(args.model, args.episode)
    clip.check(episode)
    rows = {"true": episode.obs[clip.start + 1 : clip.start + clip.steps + 1]}
    for name, sampling in args.sampling or [("imagined", {})]:
        rows[name] = imagined(world_of(system, sampling), episode, clip, args.seed)
    return rows
