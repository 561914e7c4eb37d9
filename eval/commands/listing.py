"""List what can be run: the committed suites with the regimes that each allows, selections of them, and the floors."""

from __future__ import annotations

import argparse

from eval.models.options import FLOORS
from eval.scores.suites import SELECTIONS, Suite, load_suite, suite_names
from eval.scores.tables import table
from loopwm.records.template import REGIMES, Regime
from loopwm.records.windows import refusal

EXAMPLE = "python -m eval list"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes none."""


def run(args: argparse.Namespace) -> None:
    suites = [_describe(load_suite(name)) for name in suite_names()]
    print(table(["Suite", "Environment", "Windows", "Families", "Horizons", "Contexts", "SHA-256"], suites))
    print(table(["Selection", "Families left out", "Of"], [_left_out(name) for name in SELECTIONS]))
    print(table(["Floor", "Predicts"], [[name, floor.purpose] for name, floor in FLOORS.items()]), end="")


def _describe(suite: Suite) -> list[str]:
    envs = sorted({window["env"] for window in suite.windows})
    families = {window["family"] for window in suite.windows}
    longest = min(len(window["actions"]) for window in suite.windows)
    regimes = [text for regime in REGIMES if (text := _runs(suite, regime))]
    counts = [str(len(suite.windows)), str(len(families)), f"1-{longest}"]
    return [suite.name, ", ".join(envs), *counts, ", ".join(regimes), suite.sha256[:12]]


def _left_out(name: str) -> list[str]:
    selection = SELECTIONS[name]
    families = [", ".join(sorted(families)) for families in selection.left_out.values()]
    return [f"SUITE:{name}", "; ".join(families), selection.source]


def _runs(suite: Suite, regime: Regime) -> str:
    """The regime, with how many windows have what it shows unless all do; empty where none has."""
    shown = sum(refusal(window, regime) is None for window in suite.windows)
    return regime if shown == len(suite.windows) else f"{regime} ({shown})" if shown else ""
