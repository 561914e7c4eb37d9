"""Measure pixel worlds.

`play` measures a trained agent in its real environment, beside random play, and in its own imagination. `curve` draws
what agents earned as they learned, `sheet` what a checkpoint imagines below what really happened, `film` beside it, of
an episode that `record` has an agent play. `atari` scores against people's.
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

EXAMPLE = "python -m eval pixels play --run runs/agent --out runs/agent/play.json"

Work = Callable[[argparse.Namespace], None]
Tasks: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    _add_pictures(tasks)
    _add_agents(tasks)


def _add_pictures(tasks: Tasks) -> None:
    purpose = "learning curves of agents: returns of real episodes over interactions"
    curve = add_task(tasks, "curve", _curve, purpose, "PNG file")
    curve.add_argument("groups", nargs="+", type=_group, metavar="NAME=DIR[,DIR...]", help="runs that share a line")
    curve.add_argument("--bins", type=positive, default=40, help="points of a line (default: %(default)s)")
    purpose = "true frames above those that a checkpoint imagines, a row for each way of sampling"
    sheet = add_task(tasks, "sheet", _sheet, purpose, "PNG file")
    sheet.add_argument("--every", type=positive, default=1, help="draw one frame in so many (default: 1)")
    purpose = "the same as an animation, side by side"
    film = add_task(tasks, "film", _film, purpose, "GIF file")
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
    """Add tasks about trained agents."""
    purpose = "returns of an agent, Crafter score, and reward in imagination against reward in play"
    play = add_task(tasks, "play", _play, purpose, "file of results")
    play.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    play.add_argument("--episodes", type=positive, default=100, help="default: %(default)s")
    play.add_argument("--rollouts", type=positive, default=10, help="imagined ones (default: %(default)s)")
    play.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    record = add_task(tasks, "record", _record, "an episode that an agent plays, for sheets and films", "file (.npz)")
    record.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    record.add_argument("--steps", type=positive, default=200, help="of which the longest episode (default: 200)")
    record.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    purpose = "human-normalised scores of Atari 100k out of files that `play` wrote"
    atari = add_task(tasks, "atari", _atari, purpose, "file of results")
    atari.add_argument("played", nargs="+", type=Path, metavar="PLAY.json", help="as many runs of each game")
    atari.add_argument("--intervals", action="store_true", help="95 %% intervals (extra: rliable)")
    atari.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def add_task(tasks: Tasks, name: str, work: Work, purpose: str, out: str) -> argparse.ArgumentParser:
    """Add a task that writes to `--out` and is done by `work`."""
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
    return name, yaml_section(section)


def yaml_section(text: str) -> dict[str, Any]:
    """Parse an option's `{KEY: VALUE}`."""
    try:
        keys = yaml.safe_load(text)
    except yaml.YAMLError:
        keys = None
    if not isinstance(keys, dict):
        raise argparse.ArgumentTypeError(f"expected {{KEY: VALUE}}, got {text!r}")
    return keys


def _group(text: str) -> tuple[str, list[Path]]:
    name, _, folders = text.partition("=")
    if not name or not folders:
        raise argparse.ArgumentTypeError(f"expected NAME=DIR[,DIR...], got {text!r}")
    return name, [Path(folder) for folder in folders.split(",")]


# torch takes seconds to import.


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


def _atari(args: argparse.Namespace) -> None:
    from eval.pixels.atari import measure

    results = measure(args.played, args.intervals, args.seed)
    write_rows(args.out, results)
    print(" ".join(f"{name} {number:.3f}" for name, number in results["overall"].items()))


def write_rows(path: Path, results: dict[str, Any]) -> None:
    """Write results to a file and print their rows."""
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
