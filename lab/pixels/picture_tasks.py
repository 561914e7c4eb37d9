"""Tasks of `python -m lab pixels` that draw worlds and agents, and the helpers that all tasks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from loopwm.records.command import positive
from loopwm.records.files import write_json

Work = Callable[[argparse.Namespace], None]
Tasks: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_task(tasks: Tasks, name: str, work: Work, purpose: str, out: str) -> argparse.ArgumentParser:
    """Add the task `name`, which runs `work` and writes to `--out`."""
    parser = tasks.add_parser(name, help=purpose, description=purpose)
    parser.add_argument("--out", type=Path, required=True, help=out)
    parser.set_defaults(work=work)
    return parser


def write_rows(path: Path, results: dict[str, Any]) -> None:
    """Write results to a file and print their rows."""
    write_json(path, results)
    for row in results["rows"]:
        print(" ".join(f"{name} {x:.3g}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items()))


def yaml_section(text: str) -> dict[str, Any]:
    """Parse an option's `{KEY: VALUE}`."""
    try:
        keys = yaml.safe_load(text)
    except yaml.YAMLError:
        keys = None
    if not isinstance(keys, dict):
        raise argparse.ArgumentTypeError(f"must be {{KEY: VALUE}}, got {text!r}")
    return keys


def add_pictures(tasks: Tasks) -> None:
    """Add tasks that draw, and the one that records an episode for them."""
    purpose = "learning curves of agents: return of real episodes by interactions"
    curve = add_task(tasks, "curve", _curve, purpose, "PNG file")
    curve.add_argument(
        "groups", nargs="+", type=_group, metavar="NAME=DIR[,DIR...]", help="runs averaged into one line"
    )
    curve.add_argument("--bins", type=positive, default=40, help="points per line (default: %(default)s)")
    purpose = "real frames above a checkpoint's imagined frames, one row per sampling configuration"
    filmstrip = add_task(tasks, "filmstrip", _filmstrip, purpose, "PNG file")
    filmstrip.add_argument("--every", type=positive, default=1, help="draw every n-th frame (default: 1)")
    purpose = "real and imagined frames as an animation, side by side"
    film = add_task(tasks, "film", _film, purpose, "GIF file")
    film.add_argument("--per-second", type=positive, default=4, help="frames per second (default: %(default)s)")
    for task in (filmstrip, film):
        _add_clip(task)
    record = add_task(
        tasks, "record", _record, "record an episode of an agent, for filmstrips and films", "file (.npz)"
    )
    record.add_argument("--run", type=Path, required=True, dest="folder", help="folder of a finished run of an agent")
    record.add_argument(
        "--steps",
        type=positive,
        default=200,
        help="steps to play; the longest episode in them is recorded (default: 200)",
    )
    record.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _add_clip(task: argparse.ArgumentParser) -> None:
    task.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    task.add_argument("--episode", type=Path, required=True, help="recorded episode (.npz)")
    task.add_argument(
        "--sampling",
        action="append",
        type=_sampling,
        metavar="NAME={KEY: VALUE}",
        help="row name and section `sampling` as YAML; may be repeated (default: the system's own)",
    )
    task.add_argument(
        "--start", type=positive, help="frame at which imagination starts (default: 10, or the middle if that is less)"
    )
    task.add_argument(
        "--context", type=positive, help="context frames up to it (default: 5, or all if these are fewer)"
    )
    task.add_argument("--steps", type=positive, help="default: 15, or up to the end of the episode")
    task.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def _sampling(text: str) -> tuple[str, dict[str, Any]]:
    name, _, section = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"must be NAME={{KEY: VALUE}}, got {text!r}")
    return name, yaml_section(section)


def _group(text: str) -> tuple[str, list[Path]]:
    name, _, folders = text.partition("=")
    if not name or not folders:
        raise argparse.ArgumentTypeError(f"must be NAME=DIR[,DIR...], got {text!r}")
    return name, [Path(folder) for folder in folders.split(",")]


# The tasks import lazily: torch takes seconds to import, and `--help` needs none of it.


def _record(args: argparse.Namespace) -> None:
    from lab.pixels.record import record_episode
    from loopwm.records.frames import write_episode

    episode = record_episode(args.folder, args.steps, args.seed)
    write_episode(args.out, episode)
    print(f"{len(episode)} steps, return {episode.reward.sum():g}")


def _curve(args: argparse.Namespace) -> None:
    from lab.pixels.curve import draw

    draw(args.out, dict(args.groups), args.bins)


def _filmstrip(args: argparse.Namespace) -> None:
    from lab.pixels.filmstrip import draw

    draw(args.out, _rows(args), args.every)


def _film(args: argparse.Namespace) -> None:
    from lab.pixels.filmstrip import animate

    animate(args.out, _rows(args), args.per_second)


def _rows(args: argparse.Namespace) -> dict[str, Any]:
    """Return the real frames and the imagined frames of each sampling configuration."""
    from lab.pixels.filmstrip import Clip, imagined, load, world_of

    system, episode = load(args.model, args.episode)
    clip = Clip.within(episode, args.start, args.context, args.steps)
    clip.check(episode)
    rows = {"true": episode.obs[clip.start + 1 : clip.start + clip.steps + 1]}
    for name, sampling in args.sampling or [("imagined", {})]:
        rows[name] = imagined(world_of(system, sampling), episode, clip, args.seed)
    return rows
