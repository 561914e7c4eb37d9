"""List the committed suites with the contexts each allows, and the baselines."""

from __future__ import annotations

import argparse

from eval.models.options import BASELINES
from eval.scores.suites import Suite, load_suite, suite_names
from eval.scores.tables import table
from loopwm.records.template import CONTEXT_KINDS
from loopwm.records.windows import refusal

EXAMPLE = "python -m eval list"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(args: argparse.Namespace) -> None:
    suites = [_describe(load_suite(name)) for name in suite_names()]
    print(table(["Suite", "Environment", "Windows", "Families", "Horizons", "Contexts", "SHA-256"], suites))
    print(table(["Baseline", "Predicts"], [[name, baseline.purpose] for name, baseline in BASELINES.items()]), end="")


def _describe(suite: Suite) -> list[str]:
    envs = sorted({window["env"] for window in suite.windows})
    families = {window["family"] for window in suite.windows}
    longest = min(len(window["actions"]) for window in suite.windows)
    count = len(suite.windows)
    shown = {kind: sum(refusal(window, kind) is None for window in suite.windows) for kind in CONTEXT_KINDS}
    context_kinds = [kind if n == count else f"{kind} ({n})" for kind, n in shown.items() if n]
    counts = [str(count), str(len(families)), f"1-{longest}"]
    return [suite.name, ", ".join(envs), *counts, ", ".join(context_kinds), suite.sha256[:12]]
