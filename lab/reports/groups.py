"""Groups of runs, one per suite, with their names and the reference run."""

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
"""Suites with windows of an expert's path."""


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
        """Return True if the suite is known to have windows of an expert's path."""
        return self.suite in EXPERT_SUITES

    @property
    def peers(self) -> list[tuple[str, Run]]:
        """Return all runs but the reference, by name."""
        return [(name, run) for name, run in zip(self.names, self.runs, strict=True) if run is not self.reference]

    @property
    def horizons(self) -> list[int]:
        return sorted({k for run in self.runs for k in run.horizons})


def load_runs(folders: Sequence[Path], store: SuiteStore) -> list[Run]:
    """Check all runs, then score them.

    Raises:
        InputError: a folder is given twice, or `check_run` rejects it
    """
    folders_read: set[Path] = set()
    for folder in folders:
        if folder.resolve() in folders_read:
            raise InputError(f"{folder}: given twice")
        folders_read.add(folder.resolve())
    checked = [check_run(folder, store) for folder in folders]
    return [run.score() for run in tqdm(checked, unit="run", desc="scoring")]


def make_groups(runs: Sequence[Run], against: Run) -> list[Group]:
    """Group runs in the order given; within a group, by context first."""
    models = list(dict.fromkeys(run.model for run in runs))
    groups = []
    for sha256 in dict.fromkeys(run.suite.sha256 for run in runs):
        members = [run for run in runs if run.suite.sha256 == sha256]
        members.sort(key=lambda run: CONTEXT_KINDS.index(run.context))
        looks = [look(models.index(run.model), CONTEXT_KINDS.index(run.context)) for run in members]
        groups.append(Group(members[0].suite.name, members, _names(members), looks, _reference(members, against)))
    return groups


def _names(runs: Sequence[Run]) -> list[str]:
    """Return model and context of each run, with the folder if that is ambiguous."""
    short = [f"{run.model}, {run.context}" for run in runs]
    counts = Counter(short)
    return [name if counts[name] == 1 else f"{name} ({run.folder.name})" for name, run in zip(short, runs, strict=True)]


def _reference(runs: Sequence[Run], against: Run) -> Run:
    """Return the run itself, else the same model and context, else the same model, else the first."""

    def likeness(run: Run) -> tuple[bool, bool, bool]:
        same = run.model == against.model
        return run is against, same and run.context == against.context, same

    return max(runs, key=likeness)
