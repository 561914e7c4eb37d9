"""Depth study: quality of one checkpoint at T = 1 .. 2 mu_rec, compared with its default depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.commands.harness import RunSettings
from eval.models.checkpoint import CheckpointPredictor, checkpoint_hash
from eval.scores.suites import Suite
from eval.scores.tables import table
from lab.reports.figures import TITLES, UNITS, save_figure
from lab.studies.differences import ALL, STUDIED, Difference, Mean, differences, means
from lab.studies.study_report import differences_table, means_table
from lab.studies.summary import FLOPS_KEYS
from lab.studies.window_scores import add_losses, read_scores, score, select_windows
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.windows import game_of
from loopwm.text.model.flops import forward_flops


def run_depth_study(model: Path, suite: Suite, settings: RunSettings, depths: Sequence[int] | None, out: Path) -> None:
    """Score missing depths, then write results.json, report.md and plot.png to `out`."""
    if not model.is_dir():
        raise InputError(f"--model: must be a checkpoint folder, got {str(model)!r}")
    windows = select_windows(suite, settings)
    predictor = CheckpointPredictor(model)
    config, default = predictor.world_model.model.config, predictor.depth.limit
    chosen = sorted({*(depths or range(1, min(round(2 * config.mu_rec), config.max_loops) + 1)), default})
    CheckpointPredictor(model, chosen[-1])  # raises for a depth over the limit before anything is written
    for depth in chosen:
        named = replace(settings, model=f"{settings.model} T={depth}")
        predictor = CheckpointPredictor(model, depth)
        score(predictor, suite, windows, named, out / f"T-{depth}")
        add_losses(predictor, windows, named, out / f"T-{depth}")
    games = [game_of(window) for window in windows]
    scores = {depth: read_scores(windows, settings.horizons, out / f"T-{depth}") for depth in chosen}
    found_means: list[Mean] = []
    found_differences: list[Difference] = []
    for depth in chosen:
        found_means += means(f"T={depth}", settings.context, [scores[depth]], settings.horizons)
        if depth != default:
            names, sides = (f"T={depth}", f"T={default}"), ([scores[depth]], [scores[default]])
            found_differences += differences(names, settings.context, *sides, settings.horizons, games)
    results = {
        "study": "depth",
        "settings": asdict(settings),
        "suite_sha256": suite.sha256,
        "windows": len(windows),
        "provenance": {"model_sha256": checkpoint_hash(model), **provenance("lab")},
        "default_depth": default,
        "flops_per_token": {str(depth): forward_flops(config, depth, FLOPS_KEYS) for depth in chosen},
        "means": [asdict(m) for m in found_means],
        "differences": [asdict(d) for d in found_differences],
    }
    write_json(out / "results.json", results)
    write_report(results, out)


def write_report(results: dict[str, Any], out: Path) -> None:
    found_means = [Mean(**m) for m in results["means"]]
    found_differences = [Difference(**d) for d in results["differences"]]
    settings = results["settings"]
    head = (
        f"# Study: depth of {settings['model']}\n\n{results['windows']} windows, {settings['context']}. The reference "
        f"is the default depth, T={results['default_depth']}. A difference counts where its paired bootstrap 95 % "
        f"interval over games excludes zero. FLOPs are of one token with {FLOPS_KEYS} keys in every layer. {UNITS}\n"
    )
    flops = [[f"T={depth}", f"{value / 1e6:.2f}"] for depth, value in results["flops_per_token"].items()]
    tables = [means_table(found_means, settings["context"], metric) for metric in STUDIED]
    parts = [head, table(["Depth", "MFLOPs a token"], flops), *tables, differences_table(found_differences)]
    write_atomic(out / "report.md", "\n".join(parts))
    plot(out / "plot.png", found_means, found_differences)


def plot(path: Path, found_means: Sequence[Mean], found_differences: Sequence[Difference]) -> None:
    """Plot one panel per metric: the mean over horizons by depth, with bounds of the difference from the reference."""
    canvas = Figure(figsize=(5 * len(STUDIED), 4), layout="constrained")
    for axes, metric in zip(canvas.subplots(1, len(STUDIED)), STUDIED, strict=True):
        points = {m.arm: m.mean for m in found_means if (m.metric, m.horizon) == (metric, ALL)}
        axes.plot([_loops(arm) for arm in points], list(points.values()), marker="o")
        for d in found_differences:
            if (d.metric, d.horizon) == (metric, ALL):
                base = points[d.reference]
                axes.vlines(_loops(d.arm), base + d.low, base + d.high, color="black" if d.counts else "gray")
        axes.set(title=TITLES[metric], xlabel="T", xticks=[_loops(arm) for arm in points])
    save_figure(path, canvas)


def _loops(arm: str) -> int:
    return int(arm.removeprefix("T="))
