"""Halting study: loops saved by exit rules, against fixed depths and against random exits at equal mean loops.

1. Fixed depths 1 .. 2 mu_rec. The one of highest EM, mean over horizons, is the best (the smaller of ties).
2. Every rule at every threshold, limited to the best depth, so that it differs from it only by its exits. (With another
limit, contexts are encoded with that many loops.)
3. For each of these, random exits of the same mean loops.

A policy keeps the quality if the paired 95 % lower bound of its EM minus the best depth's is at least -MARGIN. The same
criterion applies to fixed depths: a rule is useful if it saves more than they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.commands.harness import RunSettings
from eval.models.checkpoint import CheckpointPredictor, checkpoint_hash
from eval.scores.suites import Suite
from eval.scores.tables import percent, table
from lab.reports.figures import in_points, save_figure
from lab.studies.differences import ALL, Difference, differences
from lab.studies.exit_policies import ExitPolicy, MeanLoops, PolicyPredictor, random_policy, read_mean_loops
from lab.studies.window_scores import Scores, read_scores, score, select_windows
from loopwm.core.exit_rules import RULES, Fixed, make_rule, numbers_of
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, write_json
from loopwm.records.provenance import provenance
from loopwm.records.windows import Window, game_of

MARGIN = 0.01
"""EM that may be lost."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds to try, by rule: tau of the gate, eps of convergence, .."""

    of: Mapping[str, Sequence[float]] = field(
        default_factory=lambda: {
            "gate": (0.3, 0.5, 0.7, 0.9),
            "convergence": (0.01, 0.03, 0.1, 0.3),
        }
    )

    def policies(self, limit: int, with_gate: bool) -> list[ExitPolicy]:
        """Create one policy per threshold; without a gate, for rules that need none.

        Raises:
            InputError: a rule has no threshold and limit, or a threshold is out of range
        """
        policies_ = []
        for name, thresholds in self.of.items():
            numbers = list(numbers_of(name)) if name in RULES else []
            if numbers[1:] != ["limit"]:
                raise InputError(f"--rules: {name!r} is no rule of one threshold and a limit")
            try:
                rules = [(value, make_rule(name, {numbers[0]: value, "limit": limit})) for value in thresholds]
            except ValueError as error:
                raise InputError(str(error)) from error
            policies_ += [ExitPolicy(f"{name} {value:g}", name, rule, rule, limit) for value, rule in rules]
        return [policy for policy in policies_ if with_gate or not policy.advance.needs_gate]


@dataclass(frozen=True)
class PolicyResult:
    """Result of a policy. against_best and against_random: EM differences, mean over horizons."""

    policy: str
    family: str
    loops: MeanLoops
    em: float
    against_best: Difference | None
    against_random: Difference | None

    @property
    def keeps_quality(self) -> bool:
        return self.against_best is None or self.against_best.low >= -MARGIN


def run_halting_study(
    model: Path, suite: Suite, settings: RunSettings, thresholds: Thresholds, limit: int | None, out: Path
) -> None:
    """Score missing policies, then write results.json, report.md and plot.png to `out`.

    Args:
        model: checkpoint folder
        suite: windows
        settings: settings of the runs
        thresholds: thresholds to try
        out: folder of the study
        limit: maximum loops of the rules, None for the best fixed depth

    Raises:
        InputError: the limit is over the checkpoint's
    """
    if not model.is_dir():
        raise InputError(f"--model: {str(model)!r} is no checkpoint folder")
    windows = select_windows(suite, settings)
    config = CheckpointPredictor(model).world_model.model.config
    study = _Study(model, suite, windows, settings, out)
    thresholds.policies(1, with_gate=True)  # refuses bad ones before anything is written
    if limit is not None and limit > config.max_loops:
        raise InputError(f"--rule-limit: {limit} is above {config.max_loops}, the loops this checkpoint allows")
    deepest = min(round(2 * config.mu_rec), config.max_loops)
    fixed = [ExitPolicy(f"T={t}", "fixed", Fixed(t), Fixed(t), t) for t in range(1, deepest + 1)]
    study.score(fixed)
    best = max(fixed, key=lambda policy: (study.em(policy), -policy.limit))
    rules = thresholds.policies(limit or best.limit, config.exit_gate)
    study.score(rules)
    randoms = {policy.name: random_policy(policy, study.loops(policy)) for policy in rules}
    study.score(randoms.values())
    outcomes = [study.outcome(policy, best, None) for policy in fixed]
    outcomes += [study.outcome(policy, best, randoms[policy.name]) for policy in rules]
    outcomes += [study.outcome(policy, best, None) for policy in randoms.values()]
    results = {
        "study": "halting",
        "settings": asdict(settings),
        "thresholds": thresholds.of,
        "margin": MARGIN,
        "suite_sha256": suite.sha256,
        "windows": len(windows),
        "provenance": {"model_sha256": checkpoint_hash(model), **provenance("lab")},
        "best_fixed_depth": best.limit,
        "rule_limit": limit or best.limit,
        "has_gate": config.exit_gate,
        "policies": [{**asdict(outcome), "keeps_quality": outcome.keeps_quality} for outcome in outcomes],
    }
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(results, outcomes))
    plot(out / "plot.png", outcomes)


class _Study:
    """Scores of policies on the same windows, one folder each."""

    def __init__(self, model: Path, suite: Suite, windows: Sequence[Window], settings: RunSettings, out: Path) -> None:
        self.model, self.suite, self.windows, self.settings, self.out = model, suite, windows, settings, out

    def score(self, policies: Iterable[ExitPolicy]) -> None:
        for policy in policies:
            named = RunSettings(**{**vars(self.settings), "model": f"{self.settings.model} {policy.name}"})
            predictor = PolicyPredictor(self.model, policy, self._folder(policy))
            score(predictor, self.suite, self.windows, named, self._folder(policy))

    def loops(self, policy: ExitPolicy) -> MeanLoops:
        return read_mean_loops(self._folder(policy))

    def em(self, policy: ExitPolicy) -> float:
        return float(self._scores(policy)["em"].mean())

    def outcome(self, policy: ExitPolicy, best: ExitPolicy, random: ExitPolicy | None) -> PolicyResult:
        against_best = None if policy == best else self._difference(policy, best)
        against_random = None if random is None else self._difference(policy, random)
        loops, em = self.loops(policy), self.em(policy)
        return PolicyResult(policy.name, policy.family, loops, em, against_best, against_random)

    def _difference(self, ours: ExitPolicy, theirs: ExitPolicy) -> Difference:
        sides = [self._scores(ours)], [self._scores(theirs)]
        games = [game_of(window) for window in self.windows]
        rows = differences((ours.name, theirs.name), self.settings.context, *sides, self.settings.horizons, games)
        return next(d for d in rows if (d.metric, d.horizon) == ("em", ALL))

    def _scores(self, policy: ExitPolicy) -> Scores:
        return read_scores(self.windows, self.settings.horizons, self._folder(policy))

    def _folder(self, policy: ExitPolicy) -> Path:
        return self.out / policy.name.replace(", ", "-").replace(" ", "-")


def render(results: dict[str, Any], outcomes: Sequence[PolicyResult]) -> str:
    """Render `report.md`."""
    settings, best = results["settings"], results["best_fixed_depth"]
    head = (
        f"# Study: halting of {settings['model']}\n\n{results['windows']} windows, {settings['context']}, EM over "
        f"horizons {', '.join(map(str, settings['horizons']))}. The best fixed depth is T={best}; rules take at "
        f"most {results['rule_limit']} loops and encode contexts with as many. Quality is kept where the paired 95 % "
        f"lower bound of the EM difference from the best depth is at least {-100 * MARGIN:g} points. Loops saved are "
        "counted against it, in transitions and in decoded tokens apart. Figures but loops are percent.\n"
    )
    if not results["has_gate"]:
        head += "\nThe checkpoint has no exit gate: gate rules are left out.\n"
    header = ["Policy", "loops, advance", "loops, decode", "EM", "minus best (95 %)", "quality kept"]
    header += ["saved, advance", "saved, decode", "minus random at equal loops (95 %)"]
    return f"{head}\n" + table(header, [_row(outcome, best) for outcome in outcomes])


def _row(o: PolicyResult, best: int) -> list[str]:
    saved = [percent(1 - loops / best) for loops in (o.loops.advance, o.loops.decode)]
    verdict = "yes" if o.keeps_quality else "no"
    loops = [f"{o.loops.advance:.2f}", f"{o.loops.decode:.2f}"]
    return [o.policy, *loops, percent(o.em), _bounds(o.against_best), verdict, *saved, _bounds(o.against_random)]


def _bounds(d: Difference | None) -> str:
    return "-" if d is None else in_points(d.difference, d.low, d.high)


def plot(path: Path, outcomes: Sequence[PolicyResult]) -> None:
    """Plot EM against mean loops, of transitions and of decoded tokens."""
    canvas = Figure(figsize=(12, 4.5), layout="constrained")
    for axes, part in zip(canvas.subplots(1, 2, sharey=True), ("advance", "decode"), strict=True):
        for family in dict.fromkeys(o.family for o in outcomes):
            points = sorted((getattr(o.loops, part), 100 * o.em) for o in outcomes if o.family == family)
            style = "-o" if family == "fixed" else "x" if family == "random" else "--s"
            axes.plot(*zip(*points, strict=True), style, markersize=4, label=family)
        axes.set(xlabel=f"mean loops, {part}", ylabel="EM, percent")
        axes.legend()
    save_figure(path, canvas)
