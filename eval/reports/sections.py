"""The sections of a report: every table and plot, from groups of runs to blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval import papers
from eval.compare import Difference
from eval.papers import OURS
from eval.predictors import OPPONENTS
from eval.report import FOUR, four_cell, paper_cell, percent
from eval.reports import analysis, plots
from eval.reports.analysis import Mean, Pairs
from eval.reports.blocks import Block, Fold, Miss, Misses, Page, Plot, Plots, Section, Table, Text
from eval.reports.groups import Group
from eval.reports.plots import Line
from eval.reports.runs import Run
from eval.reports.word_diff import word_diff
from eval.scoring import OVERALL, Item

TITLES = {"em": "EM", "f1": "Token F1", "bleu4": "BLEU-4", "entity_recall": "Entity recall"}
WORST = 20
LONGEST_SHOWN = 1500
"""Characters of an observation or prediction in a word diff; the rest is counted, not shown."""

LEAD = (
    "Figures are percent. Four figures in a cell are EM / Token F1 / BLEU-4 / Entity recall; brackets hold bootstrap "
    "95 % bounds. Horizon k takes the first k actions without seeing what they lead to and scores what the last one "
    "leads to. The context is what of a window the model is shown: observed (goal and history), snapshot (goal, look, "
    "inventory, last observation) or full (snapshot and hidden state)."
)
PAPER = (
    "The paper's windows and metric definitions are not published: its rows stand here for orientation and are not "
    "measured on the same windows. Relative change is the paper's rule, (ours - its row) / its row; --- where its "
    "row is 0 and ours is not. Where the paper prints two values for a cell, in its main table and in its table of "
    "steps, both stand here."
)


def make_page(groups: Sequence[Group], made_by: str) -> Page:
    sections = [_overview(groups)]
    for index, group in enumerate(groups, start=1):
        sections += _chapter(group, f"s{index}")
    return Page("Text world models by one harness", LEAD, sections, made_by)


def _overview(groups: Sequence[Group]) -> Section:
    names = list(dict.fromkeys(f"{run.model}, {run.context}" for group in groups for run in group.runs))
    cells: dict[str, dict[str, str]] = {name: {} for name in names}
    for group in groups:
        for run in group.runs:
            row = run.row(OVERALL, run.last)
            figures = "-" if row is None else f"{percent(row['em'])} / {percent(row['f1'])}"
            place = cells[f"{run.model}, {run.context}"]
            place[group.suite] = "\n".join(filter(None, (place.get(group.suite), figures + _small(run))))
    suites = [group.suite for group in groups]
    rows = [[name, *(cells[name].get(suite, "") for suite in suites)] for name in names]
    table = Table(["Model, context", *suites], rows, "EM / Token F1 at the farthest horizon of each run.")
    lacking = [Text(line) for line in map(lacking_opponent, groups) if line]
    return Section("Overview", "overview", 2, [table, *lacking, Fold("The runs", [_runs_table(groups)])])


def lacking_opponent(group: Group) -> str:
    """A sentence about each context that is not shown beside the opponent of its environment; empty if all are."""
    env = group.runs[0].suite.windows[0]["env"]
    opponent = OPPONENTS.get(env)
    contexts = dict.fromkeys(run.context for run in group.runs)
    faced = {run.context for run in group.runs if run.model == opponent}
    lacking = [context for context in contexts if context not in faced]
    if opponent is None or not lacking:
        return ""
    return f"{group.suite}, {', '.join(lacking)}: no run of {opponent} is shown, the opponent that counts there."


def _small(run: Run) -> str:
    """What to know of a run that is not of the whole suite."""
    whole = len(run.suite.windows)
    return "" if run.windows == whole else f" (n = {run.windows})"


def _runs_table(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        for name, run in zip(group.names, group.runs, strict=True):
            state = "finished" if run.finished else f"partial: {run.windows} of {run.asked} windows"
            code = str(run.provenance.get("commit", "-"))[:10]
            model = str(run.spec.get("model_sha256", "-"))[:10]
            depth = str(run.spec.get("depth", "-"))
            cells = [str(run.windows), state, percent(run.cut_share), depth, model, code]
            rows.append([name, group.suite, *cells])
    header = ["Run", "Suite", "Windows", "State", "History cut, % of windows", "Loops", "Model hash", "Commit"]
    return Table(header, rows)


def _chapter(group: Group, anchor: str) -> list[Section]:
    parts: list[tuple[str, str, list[Block]]] = [
        ("By horizon", "horizon", _by_horizon(group, anchor)),
        ("Beside the paper", "paper", _paper(group)),
        (f"Differences from {group.reference_name}", "peers", _differences(group)),
        ("By length of the observation", "length", _by_length(group, anchor)),
        ("What changed, what could be known", "splits", _splits(group, anchor)),
        ("Counterfactual pairs", "pairs", _pairs(group, anchor)),
        (f"The worst predictions of {group.reference_name}", "worst", _worst(group.reference)),
    ]
    head = Section(group.suite, anchor, 2, [Text(_chapter_lead(group))])
    return [head, *(Section(title, f"{anchor}-{name}", 3, blocks) for title, name, blocks in parts if blocks)]


def _chapter_lead(group: Group) -> str:
    windows = group.runs[0].suite.windows
    partial = [name for name, run in zip(group.names, group.runs, strict=True) if not run.finished]
    lead = f"{len(windows)} windows, {len({window['family'] for window in windows})} families, {len(group.runs)} runs."
    return lead if not partial else f"{lead} Not finished, figures are of the windows so far: {'; '.join(partial)}."


# By horizon


def _by_horizon(group: Group, anchor: str) -> list[Block]:
    ticks = [str(k) for k in group.horizons]
    drawn = []
    for metric in FOUR:
        lines = _lines(group, lambda run, m=metric: [_row_mean(run, m, k) for k in group.horizons])  # type: ignore[misc]
        lines += _paper_lines(group, metric)
        name = f"{anchor}-horizon-{metric}"
        drawn.append(Plot(name, TITLES[metric], plots.plot_lines(name, "Horizon", TITLES[metric], ticks, lines)))
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        rows.append([name, str(run.windows), *(_horizon_cell(run.row(OVERALL, k)) for k in group.horizons)])
    return [Table(["Run", "n", *(f"Horizon {k}" for k in ticks)], rows), Plots(drawn)]


def _horizon_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    low, high = row["ci95"]["em"]
    return f"{four_cell(row)}\nEM [{percent(low)}, {percent(high)}]"


def _row_mean(run: Run, metric: str, horizon: int) -> Mean | None:
    row = run.row(OVERALL, horizon)
    if row is None or metric not in row:
        return None
    low, high = row["ci95"][metric]
    return Mean(row[metric], low, high, row["n"])


def _paper_lines(group: Group, metric: str) -> list[Line]:
    """The paper's own model, where it prints every horizon."""
    environment = papers.paper_rows()["suites"].get(group.suite)
    if environment is None:
        return []
    name = next(paper for paper, ours in OURS.items() if ours == metric)
    found = [papers.printed(environment, "LoopWM", k, OVERALL) for k in group.horizons]
    values = [rows[0].figures[name] / 100 if rows else None for rows in found]
    means = [None if value is None else Mean(value, value, value, 0) for value in values]
    return [Line("paper: LoopWM", plots.PAPER, means)]


def _lines(group: Group, means: Callable[[Run], Sequence[Mean | None]]) -> list[Line]:
    drawn = zip(group.names, group.looks, group.runs, strict=True)
    return [Line(name, look, means(run)) for name, look, run in drawn]


# Beside the paper


def _paper(group: Group) -> list[Block]:
    environment = papers.paper_rows()["suites"].get(group.suite)
    if environment is None:
        return []
    horizon = papers.paper_rows()["horizon"]
    blocks: list[Block] = [Text(PAPER)]
    overall = {k: _paper_overall(group, environment, k) for k in group.horizons if _is_printed(environment, k)}
    blocks += [overall.pop(k) for k in [horizon] if k in overall]
    if overall:
        blocks.append(Fold("Other horizons", list(overall.values())))
    for name, run in zip(group.names, group.runs, strict=True):
        horizons = run.horizons if run is group.reference else [k for k in run.horizons if k == horizon]
        tables = [_paper_families(run, environment, k) for k in horizons if _is_printed(environment, k)]
        if tables:
            blocks.append(Fold(f"{name}: by family", tables))
    return blocks


def _is_printed(environment: str, horizon: int) -> bool:
    return any(papers.printed(environment, system, horizon, OVERALL) for system in papers.systems(environment))


def _paper_overall(group: Group, environment: str, horizon: int) -> Table:
    """Runs, then the paper's rows with what the reference run changes against each."""
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        if (row := run.row(OVERALL, horizon)) is not None:
            rows.append([name, *(percent(row.get(metric)) for metric in FOUR), ""])
    ours = group.reference.row(OVERALL, horizon)
    for system in papers.systems(environment):
        for printed in papers.printed(environment, system, horizon, OVERALL):
            figures = [f"{printed.figures[metric]:.1f}" for metric in OURS]
            rows.append([f"paper: {system} ({printed.table})", *figures, _relative(ours, printed.figures)])
    header = ["Overall", *(TITLES[metric] for metric in FOUR), f"{group.reference_name} against this row, %"]
    return Table(header, rows, f"Horizon {horizon}.")


def _paper_families(run: Run, environment: str, horizon: int) -> Table:
    systems = papers.systems(environment)
    printed = [s for s in systems if papers.printed(environment, s, horizon, OVERALL)]
    rows = []
    for row in run.rows:
        if row["horizon"] == horizon:
            cells = [_paper_cell(row, environment, system, horizon) for system in printed]
            rows.append([row["family"], str(row["n"]), four_cell(row), *cells])
    caption = f"Horizon {horizon}. Second lines: relative change of this run against the row above, %."
    return Table(["Family", "n", "this run", *(f"paper: {system}" for system in printed)], rows, caption)


def _paper_cell(ours: Mapping[str, Any], environment: str, system: str, horizon: int) -> str:
    found = papers.printed(environment, system, horizon, ours["family"])
    both = len(found) > 1
    lines = []
    for row in found:
        lines += [paper_cell(row.figures) + (f" ({row.table})" if both else ""), _relative(ours, row.figures)]
    return "\n".join(lines) or "-"


def _relative(ours: Mapping[str, Any] | None, figures: Mapping[str, float]) -> str:
    if ours is None:
        return "-"
    changes = [
        papers.relative_change(100 * ours[name], figures[metric]) if name in ours else None
        for metric, name in OURS.items()
    ]
    return " / ".join("---" if change is None else f"{change:+.1f}" for change in changes)


# Peers


def _differences(group: Group) -> list[Block]:
    if not group.peers:
        return []
    text = (
        "Each run minus the reference, in points, paired over the windows both have predicted. "
        "An asterisk: the interval excludes 0."
    )
    return [Text(text), *(_difference_table(group, metric) for metric in FOUR[:2])]


def _difference_table(group: Group, metric: str) -> Table:
    rows = []
    for name, run in group.peers:
        found = [analysis.difference(run, group.reference, metric, k) for k in group.horizons]
        shared = max((d.n for d in found if d is not None), default=0)
        rows.append([name, str(shared), *map(_difference_cell, found)])
    return Table(["Run", "n", *(f"Horizon {k}" for k in group.horizons)], rows, TITLES[metric])


def _difference_cell(d: Difference | None) -> str:
    if d is None:
        return "-"
    star = "*" if d.low > 0 or d.high < 0 else ""
    return f"{_points(d.difference)}{star}\n[{_points(d.low)}, {_points(d.high)}]"


def _points(fraction: float) -> str:
    return f"{100 * fraction:+.1f}"


# Splits


def _by_length(group: Group, anchor: str) -> list[Block]:
    ticks = analysis.length_names()
    found = {id(run): analysis.em_by_length(run.at(run.last)) for run in group.runs}
    lines = _lines(group, lambda run: found[id(run)])
    name = f"{anchor}-length"
    svg = plots.plot_lines(name, "Words of the true observation", "EM", ticks, lines)
    rows = [[name, *map(_mean_cell, found[id(run)])] for name, run in zip(group.names, group.runs, strict=True)]
    caption = "EM at the farthest horizon by the number of words of the true observation; n in parentheses."
    return [Plots([Plot(name, "EM by observation length", svg)]), Table(["Run", *ticks], rows, caption)]


def _splits(group: Group, anchor: str) -> list[Block]:
    changed = _split(group, lambda item: item.changed)
    decidable = _split(group, lambda item: item.decidable)
    drawn = [
        _split_plot(f"{anchor}-changed", "Changed and unchanged", ("changed", "unchanged"), changed),
        _split_plot(f"{anchor}-decidable", "Decidable and not", ("decidable", "not decidable"), decidable),
    ]
    header = ["Run", "changed", "unchanged", "decidable", "not decidable"]
    rows = [[a[0], *map(_mean_cell, (*a[1:], *b[1:]))] for a, b in zip(changed, decidable, strict=True)]
    text = (
        "EM at the farthest horizon. Changed: the true observation differs from the last one of the history. "
        "Decidable: it names only what the context shown or the actions name."
    )
    return [Text(text), Plots(drawn), Table(header, rows, "EM with 95 % bounds; n in parentheses.")]


Split = tuple[str, Mean | None, Mean | None]


def _split(group: Group, chosen: Callable[[Item], bool]) -> list[Split]:
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        items = run.at(run.last)
        rest = analysis.em_where(items, lambda item: not chosen(item))
        rows.append((name, analysis.em_where(items, chosen), rest))
    return rows


def _split_plot(name: str, title: str, kinds: tuple[str, str], rows: Sequence[Split]) -> Plot:
    return Plot(name, title, plots.plot_splits(name, "EM", kinds, rows))


def _mean_cell(mean: Mean | None) -> str:
    if mean is None:
        return "-"
    return f"{percent(mean.value)} ({mean.n})\n[{percent(mean.low)}, {percent(mean.high)}]"


# Counterfactual pairs


def _pairs(group: Group, anchor: str) -> list[Block]:
    found: list[tuple[str, Pairs]] = []
    for name, run in zip(group.names, group.runs, strict=True):
        if (pairs := analysis.counterfactual_pairs(run)) is not None:
            found.append((name, pairs))
    if not found:
        return []
    text = (
        "The windows of a pair differ in one earlier action, and therefore in what the last one leads to. Whoever says "
        "the same for both has one of them wrong."
    )
    name, kinds = f"{anchor}-pairs", ("both right", "the same said for both")
    svg = plots.plot_splits(name, "Share of pairs", kinds, [(n, p.both, p.same) for n, p in found])
    header = ["Run", "both right", "fact right", "counterfact right", "the same said for both"]
    rows = [[n, *map(_mean_cell, (p.both, p.fact, p.counterfact, p.same))] for n, p in found]
    return [Text(text), Plots([Plot(name, "Counterfactual pairs", svg)]), Table(header, rows, "Share of pairs.")]


# The worst


def _worst(run: Run) -> list[Block]:
    actions = {window["id"]: window["actions"] for window in run.suite.windows}
    items = analysis.worst(run.items, WORST)
    if not items:
        return []
    title = f"{len(items)} of lowest token F1 (the longer observation first), all horizons"
    misses = [_miss(item, actions[item.window_id][: item.horizon]) for item in items]
    return [Fold(title, [Misses(misses)])]


def _miss(item: Item, actions: Sequence[str]) -> Miss:
    spans = word_diff(_shown(item.reference), _shown(item.prediction))
    scores = f"F1 {percent(item.scores.f1)}, BLEU-4 {percent(item.scores.bleu4)}"
    return Miss(f"{item.window_id}, horizon {item.horizon}", " > ".join(actions), scores, spans)


def _shown(text: str) -> str:
    rest = len(text) - LONGEST_SHOWN
    return text if rest <= 0 else f"{text[:LONGEST_SHOWN]} [and {rest} characters more]"
