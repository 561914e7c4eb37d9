"""The pictures of the pictures page, each with a caption."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.commands.calibration import calibrate
from eval.scores.rows import OVERALL
from lab.estimates import over_runs
from lab.reports import papers
from lab.reports.figures import in_points
from lab.reports.picture_store import PictureStore
from lab.reports.plots import COLORS, INK, MARKERS, STYLE, make_canvas, svg_text
from lab.reports.results_page import SHIPPED_NAME, SUITE_TITLES, Result, called, stands

FEWEST = 10
"""Actions of a tenth of probability that are drawn."""
PAPER = "the paper's LoopWM, other windows"


@dataclass(frozen=True)
class Picture:
    """One picture. draw: returns the figure and its caption, or None without results to draw.

    of: results it is drawn from, besides the runs on suites, whose commands are elsewhere on the page.
    """

    name: str
    title: str
    command: str
    draw: Callable[[PictureStore], tuple[Figure, str] | None]
    of: Callable[[PictureStore], Sequence[Result]] = lambda store: ()


def pictures(store: PictureStore) -> Iterator[tuple[Picture, str | None, str]]:
    """Yield (picture, SVG, caption); the SVG is None without results to draw."""
    for picture in PICTURES:
        with mpl.rc_context(STYLE):
            drawing = picture.draw(store)
            svg = None if drawing is None else svg_text(drawing[0], picture.name)
        yield picture, svg, "" if drawing is None else drawing[1]


def _horizons(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot EM over horizons with 95 % bands: a panel a suite, and one of its unseen windows if known."""
    observed = [run for run in store.runs if run["context"] == "observed"]
    panels = [(suite, name) for suite in SUITE_TITLES for name in ("em", "em_novel")]
    panel_lines = {panel: _lines(observed, *panel) for panel in panels}
    panel_lines = {
        panel: lines for panel, lines in panel_lines.items() if lines and (panel[1] == "em" or "500" in panel[0])
    }
    if not panel_lines:
        return None
    canvas, grid = make_canvas(9, 2.4 * math.ceil(len(panel_lines) / 4), math.ceil(len(panel_lines) / 4), 4)
    names = sorted({called(run["model"]) for run in observed}, key=lambda name: (name != SHIPPED_NAME, name))
    looks = {name: (COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}
    for axes in grid[len(panel_lines) :]:
        axes.axis("off")
    for axes, ((suite, name), lines) in zip(grid, panel_lines.items(), strict=False):
        for label, points in lines.items():
            color, marker = looks[label]
            ks = [k for k, *_ in points]
            axes.plot(ks, [y for _, y, _, _ in points], color=color, marker=marker, ms=3, lw=1.2, label=label)
            axes.fill_between(ks, [a for *_, a, _ in points], [b for *_, b in points], color=color, alpha=0.15, lw=0)
        if name == "em":
            _paper_line(axes, suite)
        axes.set_title(_short_title(suite) + (": unseen" if name == "em_novel" else ""), fontsize=7)
        axes.set(ylim=(0, 100), xticks=range(1, 6))
    _legend(canvas, grid)
    canvas.supxlabel("horizon: actions before the observation that is decoded", fontsize=8)
    canvas.supylabel("exact match, %", fontsize=8)
    return canvas, _standing(observed)


def _lines(runs: Sequence[Result], suite: str, name: str) -> dict[str, list[tuple[int, float, float, float]]]:
    """Return (horizon, percent, bounds) of each model."""
    by_model = {}
    for run in (run for run in runs if run["suite"] == suite):
        rows = [row for row in run["rows"] if row["family"] == OVERALL and name in row["ci95"]]
        points = [(row["horizon"], 100 * row[name], *(100 * bound for bound in row["ci95"][name])) for row in rows]
        if points:
            by_model[called(run["model"])] = sorted(points)
    return by_model


def _paper_line(axes: Axes, suite: str) -> None:
    environment = papers.environment_beside(suite)
    by_horizon = {k: papers.printed(environment, "LoopWM", k, OVERALL) for k in range(1, 6)} if environment else {}
    points = [(k, rows[0].figures["em"]) for k, rows in by_horizon.items() if rows]
    if points:
        axes.plot(*zip(*points, strict=True), "-.", color=INK, marker="x", ms=4, lw=1, label=PAPER)


def _standing(runs: Sequence[Result]) -> str:
    suites: dict[str, list[str]] = {}
    for run in (run for run in runs if called(run["model"]) == SHIPPED_NAME):
        if stand := stands(run, [other for other in runs if other["suite"] == run["suite"]]):
            suites.setdefault(stand[0], []).append(run["suite"])
    parts = [f"{verdict} it on {', '.join(names)}" for verdict, names in suites.items()]
    return f"{SHIPPED_NAME} beside the best program that learns nothing: {'; '.join(parts) or 'none was run'}."


def _world(suite: str) -> str:
    return SUITE_TITLES[suite].split(",")[0]


def _short_title(suite: str) -> str:
    return SUITE_TITLES[suite].replace("pairs of a path and another action", "counterfactual")


def _trust(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot how often predictions of a trust are right, and how often those that are trusted most are."""
    if not store.trusts:
        return None
    canvas, (reliability, coverage) = make_canvas(9, 3.2, 1, 2)
    reliability.plot([0, 1], [0, 1], "--", color=INK, lw=1)
    for i, world in enumerate(dict.fromkeys(_world(suite) for suite in store.trusts)):
        pairs = [pair for suite, pair in store.trusts.items() if _world(suite) == world]
        bins = calibrate(*map(np.concatenate, zip(*pairs, strict=True))).bins
        looks = {"color": INK, "marker": MARKERS[-1 - i], "ms": 5, "lw": 1.2, "label": world}
        reliability.plot([b.trust for b in bins], [b.right for b in bins], **looks)  # type: ignore[arg-type]
    halves = {}
    for i, (suite, (trusts, right)) in enumerate(store.trusts.items()):
        ranked = right[np.argsort(-trusts, kind="stable")]
        rights = {share: 100 * ranked[: max(1, len(ranked) * share // 100)].mean() for share in range(5, 101, 5)}
        looks = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "ms": 3, "lw": 1.2}
        looks["label"] = _short_title(suite)
        coverage.plot(list(rights), list(rights.values()), **looks)  # type: ignore[arg-type]
        halves[suite] = rights[50]
    reliability.set(xlabel="trust", ylabel="share exactly right")
    coverage.set(xlabel="answers with the most trust, %", ylabel="exactly right, %", ylim=(40, 101))
    _legend(canvas, [reliability, coverage])
    trusts, right = (np.concatenate(parts) for parts in zip(*store.trusts.values(), strict=True))
    all_of, least = calibrate(trusts, right), min(halves, key=lambda suite: halves[suite])
    return canvas, (
        f"{all_of.n:,} answers of the test suites: AUROC {all_of.auroc:.3f}, calibration error {all_of.ece:.3f}; "
        f"of the half with the most trust {100 * all_of.right_at[50]:.1f} % are right, in a single suite at least "
        f"{halves[least]:.1f} % ({SUITE_TITLES[least]})."
    )


def _acceptance(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot how often the simulator accepts candidates of a probability of acceptance."""
    if not store.acceptances:
        return None
    canvas, (axes,) = make_canvas(9, 3.2, 1, 1)
    axes.plot([0, 1], [0, 1], "--", color=INK, lw=1)
    captions = []
    for i, result in enumerate(store.acceptances):
        name = result["file"].split(".")[0].removeprefix("acceptance_")
        points = [(x, y) for n, x, y in result["head"]["bins"] if n >= FEWEST]
        axes.plot(*zip(*points, strict=True), color=COLORS[i], marker=MARKERS[i], ms=4, label=name)
        accepted = result["head_and_text"]["accepted"]
        bounds = "" if accepted["f1_ci95"] is None else " ({:.2f} to {:.2f})".format(*accepted["f1_ci95"])
        captions.append(f"{name} {accepted['f1']:.2f}{bounds} in {result['states']} states")
    axes.set(xlabel="probability of acceptance", ylabel="share that is accepted")
    _legend(canvas, [axes])
    whose = _whose(store.acceptances[0], store)
    return canvas, (
        f"F1 of accepted actions, {whose}: {'; '.join(captions)}. Not drawn: tenths of fewer than {FEWEST} actions."
    )


def _families(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot EM at the paper's horizon by family: ours, the best baseline, the paper."""
    horizon, by_suite = papers.paper_rows()["horizon"], {}
    for suite, environment in papers.paper_rows()["suites"].items():
        runs = [run for run in store.runs if run["suite"] == suite and run["context"] == "observed"]
        ours = next((run for run in runs if called(run["model"]) == SHIPPED_NAME), None)
        if ours and any(row["family"] != OVERALL for row in ours["rows"]):
            stand = stands(ours, runs)
            by_suite[suite] = (environment, [ours] + ([stand[1]] if stand else []))
    if not by_suite:
        return None
    canvas, grid = make_canvas(9, 4.2, 1, len(by_suite))
    better = []
    for axes, (suite, (environment, runs)) in zip(grid, by_suite.items(), strict=True):
        rows = {row["family"]: row for row in runs[0]["rows"] if row["horizon"] == horizon and row["family"] != OVERALL}
        names = sorted(rows, key=lambda name: (-rows[name]["n"], name))
        _dots(axes, runs, names, horizon)
        printed = {name: papers.printed(environment, "LoopWM", horizon, name) for name in names}
        known = {name: cells[0].figures["em"] for name, cells in printed.items() if cells}
        places = [names.index(name) for name in known]
        axes.plot(list(known.values()), places, "x", color=INK, ms=5, label=PAPER)
        axes.set_yticks(range(len(names)), [f"{name} ({rows[name]['n']})" for name in names], fontsize=7)
        axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(-3, 103), xlabel=f"exact match at horizon {horizon}, %")
        axes.set_title(SUITE_TITLES[suite], fontsize=8)
        above = sum(100 * rows[name]["em"] > value for name, value in known.items())
        better.append(f"{above} of {len(known)} families of {SUITE_TITLES[suite]}")
    _legend(canvas, grid)
    return (
        canvas,
        f"{SHIPPED_NAME} is above the paper's printed figure in {' and '.join(better)} (not the same windows).",
    )


def _dots(axes: Axes, runs: Sequence[Result], names: Sequence[str], horizon: int) -> None:
    for i, run in enumerate(runs):
        rows = {row["family"]: row for row in run["rows"] if row["horizon"] == horizon}
        places = [(place + 0.24 * (i - 0.5), rows[name]) for place, name in enumerate(names) if name in rows]
        axes.plot([100 * row["em"] for _, row in places], [y for y, _ in places], MARKERS[i], color=COLORS[i], ms=4,
                  label=called(run["model"]))  # fmt: skip
        bounds = [(y, row["ci95"]["em"]) for y, row in places if "em" in row.get("ci95", {})]
        for y, (low, high) in bounds:
            axes.plot([100 * low, 100 * high], [y, y], color=COLORS[i], lw=0.8)


def _rollouts(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot EM over the depth of whole imagined episodes, in the latent and with text fed back."""
    if not store.rollouts:
        return None
    canvas, grid = make_canvas(9, 2.8, 1, len(store.rollouts))
    captions = []
    for axes, result in zip(grid, store.rollouts, strict=True):
        for i, way in enumerate(dict.fromkeys(row["way"] for row in result["rows"])):
            rows = [row for row in result["rows"] if row["way"] == way]
            depths = [row["depth"] for row in rows]
            axes.plot(depths, [100 * row["em"] for row in rows], color=COLORS[i], marker=MARKERS[i], ms=3, lw=1.2,
                      label=way.replace("_", " "))  # fmt: skip
            bounds = [[100 * row["em"]] * 2 if row["ci95"] is None else [100 * b for b in row["ci95"]] for row in rows]
            lows, highs = zip(*bounds, strict=True)
            axes.fill_between(depths, lows, highs, color=COLORS[i], alpha=0.15, lw=0)
        axes.set(ylim=(0, 100), xlabel="depth: steps imagined", ylabel="exact match, %")
        axes.set_title(f"{result['env']}, {result['n']} episodes, {_whose(result, store)}", fontsize=8)
        d = result["latent_minus_fed_back"]
        captions.append(f"{result['env']} {in_points(d['difference'], d['low'], d['high'])}")
    _legend(canvas, grid)
    return canvas, f"Latent minus fed back, EM over whole episodes: {'; '.join(captions)}."


def _forest(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot every arm of every study minus its reference."""
    rows = [(study, d) for study in store.studies for d in study["differences"]]
    if not rows:
        return None
    canvas, (axes,) = make_canvas(9, 0.8 + 0.19 * len(rows), 1, 1)
    sure = 0
    for y, (_, d) in enumerate(rows):
        # Stored figures are rounded: a small negative one becomes -0.0, whose sign still gives its side.
        clear = (d["low"] > 0 or d["high"] < 0) and len({math.copysign(1, v) for v in d["by_seed"]}) <= 1
        sure += clear
        color = COLORS[0] if clear else INK
        axes.plot([100 * d["low"], 100 * d["high"]], [y, y], color=color, lw=1.2)
        axes.plot([100 * d["difference"]], [y], "o", color=color, ms=4, markerfacecolor=color if clear else "none")
    labels = [f"{_named(study, store)}: {d['arm']} - {d['reference']}" for study, d in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="difference of exact match, points; filled: counts as one")
    return canvas, f"{sure} of {len(rows)} differences leave out zero with every seed on the same side."


def _costs(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot EM against FLOPs a token: loops of a checkpoint, joined; arms of a study that trained them."""
    studies = [study for study in store.studies if study["costs"]]
    if not studies:
        return None
    canvas, (axes,) = make_canvas(9, 3.2, 1, 1)
    captions = []
    for i, study in enumerate(studies):
        points = sorted((cost["mflops"], 100 * cost["em"], cost["arm"]) for cost in study["costs"])
        joined = "-" if study["study"] == "depth" else "none"
        label = _named(study, store)
        axes.plot([x for x, *_ in points], [y for _, y, _ in points], linestyle=joined, color=COLORS[i],
                  marker=MARKERS[i], ms=4, lw=1.2, label=label)  # fmt: skip
        for x, y, arm in points:
            axes.annotate(arm, (x, y), textcoords="offset points", xytext=(4, 3), fontsize=6)
        best = max(points, key=lambda point: (point[1], -point[0]))
        ends = [f"{arm} {y:.1f} at {x:.1f} MFLOPs" for x, y, arm in dict.fromkeys((points[0], best))]
        captions.append(f"{label}: {', best '.join(ends)}")
    axes.set(xlabel="MFLOPs a token at 512 keys", ylabel="exact match, %")
    _legend(canvas, [axes])
    return canvas, "; ".join(captions) + "."


def _service(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot tokens a second over concurrent requests, with the bound by memory reads for different worlds."""
    if not store.loads:
        return None
    result = store.loads[-1]
    canvas, (axes,) = make_canvas(9, 3.2, 1, 1)
    for i, workload in enumerate(dict.fromkeys(row["workload"] for row in result["load"])):
        rows = [row for row in result["load"] if row["workload"] == workload]
        axes.plot([row["at_once"] for row in rows], [row["tokens_per_second"] for row in rows], color=COLORS[i],
                  marker=MARKERS[i], ms=4, lw=1.2, label=workload)  # fmt: skip
    roof = sorted((row["at_once"], row["tokens_per_second"]) for row in result["roof"])
    axes.plot(*zip(*roof, strict=True), "--", color=INK, lw=1, label="roof: memory reads, different worlds")
    ticks = sorted({row["at_once"] for row in result["load"]})
    axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="tokens a second")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    _legend(canvas, [axes])
    first = result["load"][0]["workload"]
    rates = {row["at_once"]: row["tokens_per_second"] for row in result["load"] if row["workload"] == first}
    best = max(rates, key=lambda at_once: rates[at_once])
    caption = f"{rates[best]:.0f} tokens a second with {best} at once, {rates[ticks[0]]:.0f} with {ticks[0]}"
    return canvas, f"{first.capitalize()}: {caption} ({_whose(result, store)})."


def _agents(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot final scores of real games by the same agent, with the model and without."""
    if not store.agents:
        return None
    canvas, grid = make_canvas(9, 2.2, 1, len(store.agents))
    captions = []
    for axes, result in zip(grid, store.agents, strict=True):
        arms = list(result["arms"].items())
        _plot_intervals(axes, [score for _, score in arms])
        axes.set_yticks(range(len(arms)), [arm for arm, _ in arms], fontsize=8)
        axes.set(ylim=(len(arms) - 0.5, -0.5), xlim=(0, 100), xlabel="final score of 100")
        axes.set_title(f"{result['n']} games of {result['split']}, {_whose(result, store)}", fontsize=8)
        first = next(d for d in result["differences"] if d["b"] == "retrieval")
        captions.append(
            f"{first['a']} minus {first['b']}, {_whose(result, store)}: "
            f"{in_points(first['mean'] / 100, *(b / 100 for b in first['ci95']))}"
        )
    return canvas, f"Score by looking ahead in the model, {'; '.join(captions)}."


def _searches(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot real steps of an agent that searches, by the order of the places."""
    if not store.searches:
        return None
    canvas = _plot_arms(store.searches, "steps", "real steps a game", store)
    captions = (
        f"{_whose(result, store)}, "
        + ", ".join(f"{_change(row['steps'])} from {arm}" for arm, row in result["differences"].items())
        for result in store.searches
    )
    return canvas, f"Steps by searching where the model imagines things: {'; '.join(captions)}."


def _policies(store: PictureStore) -> tuple[Figure, str] | None:
    """Plot games won by a policy that was cloned, and by one that then learned in imagination, a panel a seed."""
    if not store.policies:
        return None
    canvas = _plot_arms(store.policies, "won", "games won, %", store)
    first, gains = store.policies[0], [_change(result["difference"]["won"]) for result in store.policies]
    gain = _change(over_runs([result["by_game"] for result in store.policies])["difference"]["won"])
    seeds = f" (by seed {', '.join(gains)})" if len(gains) > 1 else ""
    whose = f"{_whose(first, store)}, {first['demonstrations']} demonstrations"
    return canvas, f"Real games won after learning in imagination, against the clone, {whose}: {gain}{seeds}."


def _change(difference: Mapping[str, Any]) -> str:
    low, high = difference["ci95"]
    return f"{difference['mean']:+.1f} ({low:+.1f} to {high:+.1f})"


def _plot_arms(results: Sequence[Mapping[str, Any]], measure: str, label: str, store: PictureStore) -> Figure:
    """Plot one measure of each result's arms, result beside result."""
    canvas, grid = make_canvas(9, 2.2, 1, len(results))
    for axes, result in zip(grid, results, strict=True):
        arms = list(result["arms"].items())
        _plot_intervals(axes, [row[measure] for _, row in arms])
        axes.set_yticks(range(len(arms)), [arm for arm, _ in arms], fontsize=8)
        axes.set(ylim=(len(arms) - 0.5, -0.5), xlabel=label)
        axes.set_xlim(left=0)
        seed = f", seed {result['seed']}" if "seed" in result else ""
        axes.set_title(f"{result['n']} games of {result['split']}, {_whose(result, store)}{seed}", fontsize=8)
    return canvas


def _plot_intervals(axes: Axes, estimates: Sequence[Mapping[str, Any]]) -> None:
    """Plot means and their bounds, one below the other."""
    for y, estimate in enumerate(estimates):
        axes.plot(estimate["ci95"], [y, y], color=COLORS[0], lw=1.2)
        axes.plot([estimate["mean"]], [y], "o", color=COLORS[0], ms=5)


def _whose(result: Result, store: PictureStore) -> str:
    """Return the model's name, or the start of its hash if it is not the one that ships."""
    sha = result.get("model_sha256")
    shipped = {run["provenance"].get("model_sha256") for run in store.runs if called(run["model"]) == SHIPPED_NAME}
    if sha is None:
        return str(result["model"])
    return SHIPPED_NAME if sha in shipped else f"checkpoint {sha[:8]}"


def _named(study: Result, store: PictureStore) -> str:
    """Return the study's name, with its checkpoint or the configuration of its training."""
    of = _whose(study, store) if study["model"] else study["base"]
    return f"{study['study']}, {of}" if of else str(study["study"])


def _legend(canvas: Figure, grid: Sequence[Axes]) -> None:
    """Draw one legend for all panels, each label once."""
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    canvas.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8)


PICTURES = (
    Picture(
        "horizons",
        "Exact match over horizons",
        "python -m eval run --model MODEL --suite SUITE --horizons 1,2,3,4,5 --context observed --out RUN",
        _horizons,
    ),
    Picture(
        "families",
        "Families of tasks beside the paper",
        "python -m eval run --model MODEL --suite scienceworld-500 --context observed --out RUN",
        _families,
    ),
    Picture(
        "rollouts",
        "Whole episodes over depth",
        "python -m lab rollout --model MODEL --episodes EPISODES --context observed --limit 30 --out RUN",
        _rollouts,
        lambda store: store.rollouts,
    ),
    Picture("studies", "All studies", "python -m lab study NAME --out RUN", _forest, lambda store: store.studies),
    Picture(
        "cost",
        "Cost against exact match",
        "python -m lab study depth --model MODEL --windows WINDOWS --context observed --out RUN",
        _costs,
        lambda store: [study for study in store.studies if study["costs"]],
    ),
    Picture(
        "service",
        "The service over requests at once",
        "python -m lab.benchmarks.serve_load --windows eval/suites/scienceworld-500.jsonl.gz --out RUN",
        _service,
        lambda store: store.loads,
    ),
    Picture(
        "agents",
        "An agent with the model and without",
        "python -m lab plan --train-episodes EPISODES --out RUN",
        _agents,
        lambda store: store.agents,
    ),
    Picture(
        "search",
        "An agent that searches where the model imagines things",
        "python -m lab search --train-episodes EPISODES --out RUN",
        _searches,
        lambda store: store.searches,
    ),
    Picture(
        "policies",
        "A policy that learns in imagination",
        "python -m lab imagined-policy --demonstrations EPISODES --starts EPISODES --out RUN",
        _policies,
        lambda store: store.policies,
    ),
    Picture(
        "trust",
        "How often an answer of a trust is right",
        "python -m eval calibration RUN",
        _trust,
    ),
    Picture(
        "acceptance",
        "How often an action is accepted",
        "python -m lab acceptance --model MODEL --states STATES --out RUN",
        _acceptance,
        lambda store: store.acceptances,
    ),
)
"""In the order of the page."""
