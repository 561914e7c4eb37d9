"""Sections of a report: every table and plot, from groups of runs to blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.models.base import STRONGEST_BASELINES
from eval.scores.intervals import PairedDifference
from eval.scores.metrics import HEADLINE, METRICS
from eval.scores.rows import OVERALL, SPLITS, Item, summarize_pairs
from eval.scores.tables import DETECTION, four_cell, percent
from lab.reports import analysis, run_plots
from lab.reports.analysis import Share
from lab.reports.blocks import Block, Fold, Miss, Misses, Page, Plot, Plots, Section, Table, Text, word_diff
from lab.reports.error_kinds import ERROR_KINDS
from lab.reports.groups import Group
from lab.reports.paper_table import paper, paper_lines
from lab.reports.run_plots import Line
from lab.reports.runs import Run

WORST = 20
LONGEST_SHOWN = 1500
"""Maximum characters of an observation or prediction in a word diff; the rest is counted."""

LEAD = (
    "Figures are percent. Four figures in a cell are EM / Token F1 / BLEU-4 / Entity recall; brackets hold 95 % bounds "
    "(games resampled with all their windows, Wilson's where all or none are right). Horizon k takes the first k "
    "actions without seeing what they lead to and scores what the last one leads to. The context is what of a window "
    "the model is shown: observed (goal and history), snapshot (goal, look, inventory, last observation), full "
    "(snapshot and hidden state) or briefed (observed and the hidden state at the start)."
)


def make_page(groups: Sequence[Group], made_by: str) -> Page:
    sections = [_overview(groups)]
    for index, group in enumerate(groups, start=1):
        sections += _chapter(group, f"s{index}")
    return Page("Text world models by one harness", LEAD, sections, made_by)


def _overview(groups: Sequence[Group]) -> Section:
    """Build the overview: hard splits first, then all windows, which are easy because most occur in training."""
    names = list(dict.fromkeys(f"{run.model}, {run.context}" for group in groups for run in group.runs))
    first = [_overview_column(group, title, figure) for group in groups for title, figure in _deciding(group)]
    rest = [_overview_column(group, "", _all_windows) for group in groups]
    text = (
        "Unseen: the windows whose last observation, actions and answer stand in no train episode. Pairs: both windows "
        "of a counterfactual pair right."
    )
    blocks: list[Block] = [Text(text)]
    for caption, columns in (("What decides, at the farthest horizon of each run.", first),
                             ("All windows: EM / Token F1 at the farthest horizon of each run.", rest)):  # fmt: skip
        rows = [[name, *(cells.get(name, "") for _, cells in columns)] for name in names]
        blocks += [Table(["Model, context", *(title for title, _ in columns)], rows, caption)] if columns else []
    lacking = [Text(line) for line in map(lacking_baseline, groups) if line]
    return Section("Overview", "overview", 2, [*blocks, *lacking, Fold("The runs", [_runs_table(groups)])])


Figure = Callable[[Run], str]


def _deciding(group: Group) -> list[tuple[str, Figure]]:
    """Return title and figure of the columns that discriminate between models on a suite."""
    if any(summarize_pairs(run.items) for run in group.runs):
        return [(", pairs", lambda run: _mean_cell(_pair_means(run)["both"]))]
    if group.is_expert:
        known = any(item.in_training is not None for run in group.runs for item in run.items)
        column = (", unseen", lambda run: _mean_cell(analysis.em_where(run.at(run.last), SPLITS["novel"])))
        return [column] if known else []
    return [("", _all_windows)]


def _overview_column(group: Group, title: str, figure: Figure) -> tuple[str, dict[str, str]]:
    """Return a column's title and its cells by model and context."""
    cells: dict[str, str] = {}
    for run in group.runs:
        name = f"{run.model}, {run.context}"
        part = "" if run.windows == len(run.suite.windows) else f" (n = {run.windows})"
        cells[name] = "\n".join(filter(None, (cells.get(name), figure(run) + part)))
    return group.suite + title, cells


def _all_windows(run: Run) -> str:
    row = run.row(OVERALL, run.last)
    return "-" if row is None else f"{percent(row['em'])} / {percent(row['f1'])}"


def lacking_baseline(group: Group) -> str:
    """Name the contexts that lack a run of the strongest baseline of the environment; empty if none does."""
    env = group.runs[0].suite.windows[0]["env"]
    strongest = STRONGEST_BASELINES.get(env)
    contexts = dict.fromkeys(run.context for run in group.runs)
    faced = {run.context for run in group.runs if run.model == strongest}
    lacking = [context for context in contexts if context not in faced]
    if strongest is None or not lacking:
        return ""
    return f"{group.suite}, {', '.join(lacking)}: no run of {strongest} is shown, the strongest baseline there."


def _runs_table(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        for name, run in zip(group.names, group.runs, strict=True):
            state = "finished" if run.finished else f"partial: {run.windows} of {run.window_count} windows"
            code = _commits(run.provenance)
            model = str(run.spec.get("model_sha256", "-"))[:10]
            depth = str(run.spec.get("depth", "-"))
            cells = [str(run.windows), str(len(run.refused)), state, percent(run.cut_share), depth, model, code]
            rows.append([name, group.suite, *cells])
    header = [
        "Run",
        "Suite",
        "Windows",
        "Refused",
        "State",
        "History cut, % of windows",
        "Loops",
        "Model hash",
        "Commit",
    ]
    return Table(header, rows)


def _commits(provenance: Mapping[str, Any]) -> str:
    """Return the commits of the predictions; for results without them, the commit that wrote the results."""
    made_by = provenance.get("commits", [provenance])
    return ", ".join(str(record.get("commit", "-"))[:10] for record in made_by)


def _chapter(group: Group, anchor: str) -> list[Section]:
    parts: list[tuple[str, str, list[Block]]] = [
        ("Unseen and seen", "unseen", _unseen_and_seen(group, anchor)),
        ("Counterfactual pairs", "pairs", _pairs(group, anchor)),
        ("By horizon", "horizon", _by_horizon(group, anchor)),
        ("Beside the paper", "paper", paper(group)),
        (f"Differences from {group.reference_name}", "peers", _differences(group)),
        ("By length of the observation", "length", _by_length(group, anchor)),
        ("What changed, what could be known", "splits", _splits(group, anchor)),
        ("Wrong predictions by kind", "errors", _errors(group)),
        ("Refusals, ends and rewards", "judgements", _judgements(group)),
        (f"The worst predictions of {group.reference_name}", "worst", _worst(group.reference)),
    ]
    head = Section(group.suite, anchor, 2, [Text(_chapter_lead(group))])
    return [head, *(Section(title, f"{anchor}-{name}", 3, blocks) for title, name, blocks in parts if blocks)]


def _chapter_lead(group: Group) -> str:
    windows = group.runs[0].suite.windows
    partial = [name for name, run in zip(group.names, group.runs, strict=True) if not run.finished]
    lead = f"{len(windows)} windows, {len({window['family'] for window in windows})} families, {len(group.runs)} runs."
    lead += "" if not partial else f" Not finished, figures are of the windows so far: {'; '.join(partial)}."
    short = [f"{name}, {len(run.refused)}" for name, run in zip(group.names, group.runs, strict=True) if run.refused]
    return lead if not short else f"{lead} Refused, because they could not be shown: {'; '.join(short)}."


# By horizon


def _by_horizon(group: Group, anchor: str) -> list[Block]:
    ticks = [str(k) for k in group.horizons]
    plots = []
    for metric in HEADLINE:
        lines = _lines(group, lambda run, m=metric: [_row_mean(run, m, k) for k in group.horizons])  # type: ignore[misc]
        lines += paper_lines(group, metric)
        name = f"{anchor}-horizon-{metric}"
        title = METRICS[metric].title
        plots.append(Plot(name, title, run_plots.plot_lines(name, "Horizon", title, ticks, lines)))
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        rows.append([name, str(run.windows), *(_horizon_cell(run.row(OVERALL, k)) for k in group.horizons)])
    return [Table(["Run", "n", *(f"Horizon {k}" for k in ticks)], rows), Plots(plots)]


def _horizon_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    low, high = row["ci95"].get("em", (None, None))
    return f"{four_cell(row)}\nEM [{percent(low)}, {percent(high)}]"


def _row_mean(run: Run, metric: str, horizon: int) -> Share | None:
    row = run.row(OVERALL, horizon)
    return None if row is None else analysis.mean_of(row, metric, row["n"])


def _lines(group: Group, means: Callable[[Run], Sequence[Share | None]]) -> list[Line]:
    rows = zip(group.names, group.looks, group.runs, strict=True)
    return [Line(name, look, means(run)) for name, look, run in rows]


# Peers


def _differences(group: Group) -> list[Block]:
    if not group.peers:
        return []
    text = (
        "Each run minus the reference, in points, paired over the windows both have predicted. "
        "An asterisk: the interval excludes 0."
    )
    return [Text(text), *(_difference_table(group, metric) for metric in HEADLINE[:2])]


def _difference_table(group: Group, metric: str) -> Table:
    rows = []
    for name, run in group.peers:
        differences = [analysis.difference(run, group.reference, metric, k) for k in group.horizons]
        shared = max((d.n for d in differences if d is not None), default=0)
        rows.append([name, str(shared), *map(_difference_cell, differences)])
    return Table(["Run", "n", *(f"Horizon {k}" for k in group.horizons)], rows, METRICS[metric].title)


def _difference_cell(d: PairedDifference | None) -> str:
    if d is None:
        return "-"
    star = "*" if d.low > 0 or d.high < 0 else ""
    return f"{_points(d.difference)}{star}\n[{_points(d.low)}, {_points(d.high)}]"


def _points(fraction: float) -> str:
    return f"{100 * fraction:+.1f}"


# Splits


def _by_length(group: Group, anchor: str) -> list[Block]:
    ticks = analysis.length_names()
    by_run = {id(run): analysis.em_by_length(run.at(run.last)) for run in group.runs}
    lines = _lines(group, lambda run: by_run[id(run)])
    name = f"{anchor}-length"
    svg = run_plots.plot_lines(name, "Words of the true observation", "EM", ticks, lines)
    rows = [[name, *map(_mean_cell, by_run[id(run)])] for name, run in zip(group.names, group.runs, strict=True)]
    caption = "EM at the farthest horizon by the number of words of the true observation; n in parentheses."
    return [Plots([Plot(name, "EM by observation length", svg)]), Table(["Run", *ticks], rows, caption)]


def _unseen_and_seen(group: Group, anchor: str) -> list[Block]:
    known = [all(item.in_training is not None for item in run.items) for run in group.runs]
    if not any(known):
        return []
    header = ["Run", *(f"{name}, horizon {k}" for name in ("unseen", "seen") for k in group.horizons)]
    rows = []
    for name, run, is_known in zip(group.names, group.runs, known, strict=True):
        shares = [analysis.em_where(run.at(k), SPLITS[split]) for split in ("novel", "seen") for k in group.horizons]
        rows.append([name, *(_mean_cell(mean) if is_known else "unknown" for mean in shares)])
    text = (
        "EM. Seen: the last observation, the actions and the answer stand word for word in one train episode; unseen: "
        "they do not. Unknown: of the episodes that a checkpoint was trained on there is no record or no table."
    )
    rows_known = [row for row, is_known in zip(_split(group, SPLITS["novel"]), known, strict=True) if is_known]
    plot = _split_plot(f"{anchor}-unseen", "Unseen and seen", ("unseen", "seen"), rows_known)
    return [Text(text), Plots([plot]), Table(header, rows, "EM with 95 % bounds; n in parentheses.")]


def _splits(group: Group, anchor: str) -> list[Block]:
    changed = _split(group, SPLITS["changed"])
    answerable = _split(group, SPLITS["decidable"])
    plots = [
        _split_plot(f"{anchor}-changed", "Changed and unchanged", ("changed", "unchanged"), changed),
        _split_plot(f"{anchor}-answerable", "Answerable and not", ("answerable", "not answerable"), answerable),
    ]
    header = ["Run", "changed", "unchanged", "answerable", "not answerable"]
    rows = [[a[0], *map(_mean_cell, (*a[1:], *b[1:]))] for a, b in zip(changed, answerable, strict=True)]
    text = (
        "EM at the farthest horizon. Changed: the true observation differs from the last one of the history. "
        "Answerable: it names only what the context shown or the actions name."
    )
    return [Text(text), Plots(plots), Table(header, rows, "EM with 95 % bounds; n in parentheses.")]


Split = tuple[str, Share | None, Share | None]


def _split(group: Group, chosen: Callable[[Item], bool]) -> list[Split]:
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        items = run.at(run.last)
        rest = analysis.em_where(items, lambda item: not chosen(item))
        rows.append((name, analysis.em_where(items, chosen), rest))
    return rows


def _split_plot(name: str, title: str, kinds: tuple[str, str], rows: Sequence[Split]) -> Plot:
    return Plot(name, title, run_plots.plot_splits(name, "EM", kinds, rows))


def _mean_cell(mean: Share | None) -> str:
    if mean is None:
        return "-"
    return f"{percent(mean.value)} ({mean.n})\n[{percent(mean.low)}, {percent(mean.high)}]"


# Errors


def _errors(group: Group) -> list[Block]:
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        row = run.row(OVERALL, run.last)
        if row is not None:
            errors = run.errors(run.last)
            kinds = [str(errors[kind]) for kind in ERROR_KINDS]
            rows.append([name, str(row["n"]), str(errors.total()), *kinds])
    text = "Counts at the farthest horizon, by the rule of lab/reports/error_kinds.py."
    return [Table(["Run", "n", "wrong", *ERROR_KINDS], rows, text)]


def _judgements(group: Group) -> list[Block]:
    """Render refusals in the predicted text, and ends and rewards if a model predicts them."""
    rows = []
    for name, run in zip(group.names, group.runs, strict=True):
        if (row := run.row(OVERALL, run.last)) is not None:
            rows.append([name, _detection_cell(row["refusal"]), _detection_cell(row.get("end")), _reward_cell(row)])
    text = (
        "At the farthest horizon: precision / recall / F1 (how many are true, how many predicted). Rewards: share "
        "within half a point, and of those that are not 0."
    )
    return [Table(["Run", "refusals", "ends", "rewards"], rows, text)]


def _detection_cell(detection: Mapping[str, Any] | None) -> str:
    if detection is None:
        return "-"
    return (
        " / ".join(percent(detection.get(name)) for name in DETECTION)
        + f" ({detection['n']}, {detection['predicted']})"
    )


def _reward_cell(row: Mapping[str, Any]) -> str:
    if "reward" not in row:
        return "-"
    reward = row["reward"]
    shares = [percent(reward["accuracy"]), percent(reward.get("accuracy_nonzero"))]
    return f"{' / '.join(shares)} ({reward['n']}, {reward['n_nonzero']})"


# Counterfactual pairs


def _pairs(group: Group, anchor: str) -> list[Block]:
    means = [(n, _pair_means(run)) for n, run in zip(group.names, group.runs, strict=True)]
    if not any(means["both"] for _, means in means):
        return []
    text = (
        "The windows of a pair differ in one earlier action, and therefore in what the last one leads to. Whoever says "
        "the same for both has one of them wrong."
    )
    name, kinds = f"{anchor}-pairs", ("both right", "the same said for both")
    svg = run_plots.plot_splits(
        name, "Share of pairs", kinds, [(n, means["both"], means["same"]) for n, means in means]
    )
    header = ["Run", "both right", "fact right", "counterfact right", "the same said for both"]
    rows = [[n, *map(_mean_cell, means.values())] for n, means in means]
    return [Text(text), Plots([Plot(name, "Counterfactual pairs", svg)]), Table(header, rows, "Share of pairs.")]


def _pair_means(run: Run) -> dict[str, Share | None]:
    row = summarize_pairs(run.items) or {"n": 0}
    return {name: analysis.mean_of(row, name, row["n"]) for name in ("both", "fact", "counterfact", "same")}


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
    scores = f"F1 {percent(item.scores['f1'])}, BLEU-4 {percent(item.scores['bleu4'])}"
    return Miss(f"{item.window_id}, horizon {item.horizon}", " > ".join(actions), scores, spans)


def _shown(text: str) -> str:
    rest = len(text) - LONGEST_SHOWN
    return text if rest <= 0 else f"{text[:LONGEST_SHOWN]} [and {rest} characters more]"
