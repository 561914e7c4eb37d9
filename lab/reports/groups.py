"""Runs in groups, one a suite, with the names they go by there and the run the others are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from lab.reports.run_plots import Look, look
from lab.reports.runs import Run, SuiteStore, check_run
from loopwm.records.errors import InputError
from loopwm.records.template import CONTEXT_KINDS

EXPERT_SUITES = frozenset(("scienceworld-500", "scienceworld-dev", "alfworld-500", "alfworld-dev"))
"""Suites whose windows are of an expert's path."""


@dataclass(frozen=True)
class Group:
    """Runs on the same windows. names and looks are in the order of runs; reference is one of them."""

    suite: str
    runs: Sequence[Run]
    names: Sequence[str]
    looks: Sequence[Look]
    reference: Run

    @property
    def reference_name(self) -> str:
        return self.names[self.runs.index(self.reference)]

    @property
    def is_expert(self) -> bool:
        """Whether the windows are of an expert's path, as far as the suite is known."""
        return self.suite in EXPERT_SUITES

    @property
    def peers(self) -> list[tuple[str, Run]]:
        """All but the reference, by name."""
        return [(name, run) for name, run in zip(self.names, self.runs, strict=True) if run is not self.reference]

    @property
    def horizons(self) -> list[int]:
        return sorted({k for run in self.runs for k in run.horizons})


def load_runs(folders: Sequence[Path], store: SuiteStore) -> list[Run]:
    """Checks all runs, then scores them. Raises InputError for a folder given twice and what `check_run` refuses."""
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise InputError(f"{folder}: given twice")
        seen.add(folder.resolve())
    checked = [check_run(folder, store) for folder in folders]
    return [run.score() for run in tqdm(checked, unit="run", desc="scoring")]


def make_groups(runs: Sequence[Run], against: Run) -> list[Group]:
    """Groups in the order their first runs are given; inside, by context and then as given."""
    models = list(dict.fromkeys(run.model for run in runs))
    groups = []
    for sha256 in dict.fromkeys(run.suite.sha256 for run in runs):
        members = [run for run in runs if run.suite.sha256 == sha256]
        members.sort(key=lambda run: CONTEXT_KINDS.index(run.context))
        looks = [look(models.index(run.model), CONTEXT_KINDS.index(run.context)) for run in members]
        groups.append(Group(members[0].suite.name, members, _names(members), looks, _reference(members, against)))
    return groups


def _names(runs: Sequence[Run]) -> list[str]:
    """Model and context, with the folder where that is not enough."""
    short = [f"{run.model}, {run.context}" for run in runs]
    counts = Counter(short)
    return [name if counts[name] == 1 else f"{name} ({run.folder.name})" for name, run in zip(short, runs, strict=True)]


def _reference(runs: Sequence[Run], against: Run) -> Run:
    """The run itself, else the same model in the same context, else the same model, else the first."""

    def likeness(run: Run) -> tuple[bool, bool, bool]:
        same = run.model == against.model
        return run is against, same and run.context == against.context, same

    return max(runs, key=likeness)
