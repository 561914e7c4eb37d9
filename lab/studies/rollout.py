"""Imagine whole episodes: from the first observation, by the episode's own actions, scored at every depth.

Two ways: `latent` takes actions one after another in the latent and decodes each depth without feeding it back
(deferred decoding). `fed_back` appends every decoded text to the history.

Writes results.json, report.md, plot.png and each way's predictions to --out. The same command resumes an interrupted
run; a folder of other arguments is an error.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from eval.commands.harness import recorded_prediction, window_records
from eval.models.base import Predictor
from eval.models.options import ModelOptions, add_model_arguments, make_predictor
from eval.scores.intervals import INTERVALS, paired_difference
from eval.scores.metrics import METRICS_VERSION
from eval.scores.predictions import Key, PredictionFolder, Record
from eval.scores.rows import Item, estimates, score_window, summarize
from eval.scores.tables import percent, table, with_bounds
from lab.agents.imagination import fed_back
from loopwm.records.command import positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import sha256, write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import CONTEXT_KINDS, ContextKind
from loopwm.records.windows import Window, check_runnable, game_of, stratified_sample

EXAMPLE = (
    "python -m lab rollout --model loopwm/pretrained --episodes data/episodes/test-gold --context observed "
    "--limit 30 --out runs/eval/rollout"
)
WAYS = ("latent", "fed_back")
DEPTH_LIMIT = 30
_SCORES = ("em", "f1")

Rows = list[dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a rollout. limit: episodes to take, None for all."""

    model: str
    context: ContextKind
    depth_limit: int
    limit: int | None
    seed: int
    batch_size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, help="episode files or folders")
    parser.add_argument("--context", choices=CONTEXT_KINDS, required=True, help="what the model is shown of the start")
    parser.add_argument("--depth-limit", type=positive, default=DEPTH_LIMIT, help="most steps (default: %(default)s)")
    parser.add_argument("--limit", type=positive, help="sample of this many episodes, stratified by task")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rollouts")
    parser.add_argument("--batch-size", type=positive, default=8, help="episodes at once (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")


def run(args: argparse.Namespace) -> None:
    settings = RolloutSettings(args.model, args.context, args.depth_limit, args.limit, args.seed, args.batch_size)
    windows = select_starts(args.episodes, settings)
    longest = max(windows, key=lambda window: len(window["actions"]))
    predictor = make_predictor(args.model, windows, ModelOptions.of(args), args.context, _depths(longest))
    roll_out(predictor, windows, settings, args.out)
    print((args.out / "report.md").read_text(encoding="utf-8"), end="")


def select_starts(paths: Sequence[Path], settings: RolloutSettings) -> list[Window]:
    """Return the windows that start the episodes.

    Raises InputError without any, or for one of another environment or without what the context shows.
    """
    windows = start_windows(recorded_episodes(paths), settings.depth_limit)
    if not windows:
        raise InputError("--episodes: must have a step to imagine")
    if len(environments := sorted({window["env"] for window in windows})) > 1:
        raise InputError(f"--episodes: must be of one environment, got {', '.join(environments)}")
    chosen = stratified_sample(windows, settings.limit or len(windows), settings.seed)
    check_runnable(chosen, settings.context, (1,))
    return chosen


def start_windows(episodes: Sequence[Episode], last: int) -> list[Window]:
    """Cut one window an episode: it starts at the first observation and takes the episode's own first `last` actions.

    Episodes without actions have none. The family is the task.
    """
    windows, played = [], Counter[str]()
    for episode in episodes:
        if len(episode.steps) > 1:
            name = f"{episode.env}/{episode.task}/{episode.variation}/{episode.policy}"
            windows.append(_start_window(f"{name}/{played[name]}", episode, last))
            played[name] += 1
    return windows


def _start_window(name: str, episode: Episode, last: int) -> Window:
    first, future = episode.steps[0], episode.steps[1 : last + 1]
    before = episode.steps[: len(future)]
    return {
        "id": name,
        "env": episode.env,
        "task": episode.task,
        "variation": episode.variation,
        "family": episode.task,
        "split": episode.split,
        "goal": episode.goal,
        "history": [{"action": None, "observation": first.observation}],
        "look": first.look,
        "inventory": first.inventory,
        "hidden_state": episode.hidden_state,
        "hidden_state_start": episode.hidden_state,
        "actions": [step.action or "" for step in future],
        "observations": [step.observation for step in future],
        "rewards": [after.score - now.score for now, after in zip(before, future, strict=True)],
        "dones": [step.done for step in future],
    }


def padded(window: Window, length: int) -> Window:
    """Repeat the last action of a window up to `length`; predictions for the repeats mean nothing."""
    return {
        **window,
        "actions": _padded(window["actions"], length),
        "observations": _padded(window["observations"], length),
        "rewards": _padded(window["rewards"], length),
        "dones": _padded(window["dones"], length),
    }


def _padded(values: list[T], length: int) -> list[T]:
    return [*values, *values[-1:] * (length - len(values))]


def roll_out(predictor: Predictor, windows: Sequence[Window], settings: RolloutSettings, out: Path) -> dict[str, Any]:
    """Imagine the batches missing from `out`, write the results there and return them. windows: starts of episodes."""
    predictors = {"latent": predictor, "fed_back": fed_back(predictor, settings.model, settings.context)}
    specs = {way: rollout_spec(predictors[way], windows, settings, way) for way in WAYS}
    folders = {way: PredictionFolder(out / way, specs[way]) for way in WAYS}
    records = {way: imagine_missing(predictors[way], windows, settings, folders[way], way) for way in WAYS}
    results = make_results(specs["latent"], windows, settings, records)
    results["provenance"]["commits"] = {way: folders[way].commits() for way in WAYS}
    write_json(out / "results.json", results)
    plot_depths(out / "plot.png", results)
    write_atomic(out / "report.md", render_rollout(results))
    return results


def rollout_spec(
    predictor: Predictor, windows: Sequence[Window], settings: RolloutSettings, way: str
) -> dict[str, Any]:
    """Return the fingerprint of one way's predictions."""
    episodes = sha256("".join(json.dumps(window, sort_keys=True) for window in windows))
    return {
        **asdict(settings),
        "way": way,
        "metrics_version": METRICS_VERSION,
        "episodes_sha256": episodes,
        **predictor.identity,
    }


def imagine_missing(
    predictor: Predictor, windows: Sequence[Window], settings: RolloutSettings, folder: PredictionFolder, way: str
) -> dict[Key, Record]:
    """Imagine the batches that are incomplete in the folder. Episodes of a batch are of similar length."""
    records = folder.read()
    ordered = sorted(windows, key=lambda window: (-len(window["actions"]), window["id"]))
    batches = [ordered[i : i + settings.batch_size] for i in range(0, len(ordered), settings.batch_size)]
    with tqdm(total=len(windows), unit="episode", desc=f"{settings.model} {way}") as bar:
        for batch in batches:
            complete = all((window["id"], k) in records for window in batch for k in _depths(window))
            batch_records = {} if complete else imagine_batch(predictor, batch, settings.context)
            if new := {key: record for key, record in batch_records.items() if key not in records}:
                folder.append(list(new.values()))
                records |= new
            bar.update(len(batch))
    return records


def _depths(window: Window) -> range:
    return range(1, len(window["actions"]) + 1)


def imagine_batch(predictor: Predictor, batch: Sequence[Window], context_kind: ContextKind) -> dict[Key, Record]:
    """Return records of every depth that each episode has."""
    deepest = max(len(window["actions"]) for window in batch)
    depths = tuple(range(1, deepest + 1))
    predictions = predictor.predict([padded(window, deepest) for window in batch], context_kind, depths)
    records: dict[Key, Record] = {}
    for window, prediction in zip(batch, predictions, strict=True):
        records |= window_records(window, prediction, context_kind, _depths(window))
    return records


def make_results(
    spec: Mapping[str, Any],
    windows: Sequence[Window],
    settings: RolloutSettings,
    records: Mapping[str, Mapping[Key, Record]],
) -> dict[str, Any]:
    """Return the content of results.json.

    rows: one a way and depth, over the episodes that are that long. episodes: means over each episode's depths, then
    over episodes.
    """
    items: dict[str, list[list[Item]]] = {way: [] for way in WAYS}
    for way in WAYS:
        for window in windows:
            predicted = recorded_prediction(window, records[way], _depths(window))
            items[way].append(list(score_window(window, settings.context, predicted)))
    scores = {
        way: np.array(
            [[np.mean([item.scores[metric] for item in episode]) for metric in _SCORES] for episode in way_items]
        )
        for way, way_items in items.items()
    }
    games = [game_of(window) for window in windows]
    return {
        "model": settings.model,
        "env": windows[0]["env"],
        "context": settings.context,
        "metrics_version": METRICS_VERSION,
        "intervals": INTERVALS,
        "provenance": {**spec, **provenance("lab")},
        "n": len(windows),
        "rows": [row for way in WAYS for row in _rows(way, items[way])],
        "episodes": {way: estimates(scores[way], games, _SCORES) for way in WAYS},
        "latent_minus_fed_back": [
            asdict(paired_difference(metric, settings.depth_limit, latent, back, games))
            for metric, latent, back in zip(_SCORES, scores["latent"].T, scores["fed_back"].T, strict=True)
        ],
    }


def _rows(way: str, episodes: Sequence[Sequence[Item]]) -> Rows:
    deepest = max(len(items) for items in episodes)
    at_depth = [[items[k] for items in episodes if len(items) > k] for k in range(deepest)]
    return [{"way": way, "depth": k, **summarize(items)} for k, items in enumerate(at_depth, start=1)]


def render_rollout(results: Mapping[str, Any]) -> str:
    """Return the content of report.md."""
    by_depth: dict[int, dict[str, dict[str, Any]]] = {}
    for row in results["rows"]:
        by_depth.setdefault(row["depth"], {})[row["way"]] = row
    head = f"# Rollouts of {results['model']} in {results['env']}, {results['context']} at the start\n\n"
    head += f"{results['n']} episodes. Percent, with 95 % bounds over the games of the episodes that are that long.\n\n"
    titles = [f"{metric}, {way}" for metric in ("EM", "F1") for way in ("latent", "fed back")]
    lines = [
        [str(k), str(ways["latent"]["n"]), *(with_bounds(ways[way], metric) for metric in _SCORES for way in WAYS)]
        for k, ways in by_depth.items()
    ]
    means = [with_bounds(results["episodes"][way], metric) for metric in _SCORES for way in WAYS]
    lines.append(["mean of episodes", str(results["n"]), *means])
    differences = "".join(
        f"{title}, latent - fed back, means of episodes: {percent(d['difference'])} "
        f"({percent(d['low'])} to {percent(d['high'])})\n\n"
        for title, d in zip(("EM", "F1"), results["latent_minus_fed_back"], strict=True)
    )
    return head + table(["Depth", "n", *titles], lines) + "\n" + differences + "![by depth](plot.png)\n"


def plot_depths(path: Path, results: Mapping[str, Any]) -> None:
    """Plot EM and token F1 by depth, a line a way, with bounds."""
    from matplotlib.figure import Figure  # imported late: it takes a second, and only plots need it

    from lab.reports.figures import TITLES, save_figure

    canvas = Figure(figsize=(11, 4), layout="constrained")
    for axes, metric in zip(canvas.subplots(1, 2), _SCORES, strict=True):
        for way in WAYS:
            rows = [row for row in results["rows"] if row["way"] == way]
            depths = [row["depth"] for row in rows]
            axes.plot(
                depths, [100 * row[metric] for row in rows], marker="o", markersize=3, label=way.replace("_", " ")
            )
            bounds = 100 * np.array([row["ci95"].get(metric, [row[metric]] * 2) for row in rows])
            axes.fill_between(depths, bounds[:, 0], bounds[:, 1], alpha=0.15)
        axes.set(title=f"{TITLES[metric]} (%)", xlabel="depth: steps imagined", ylim=(0, 100))
        axes.legend(fontsize="small")
    save_figure(path, canvas)
