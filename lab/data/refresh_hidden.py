"""Refresh the hidden states of windows: replay their histories and read the hidden state at their start and end.

For windows cut with an older hidden state. Nothing else in them changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.environments import make_environment
from data_prep.environments.base import Environment
from data_prep.policies import replay
from data_prep.windows import write_windows
from lab.data.cut_suite import read_windows
from loopwm.records.episodes import Step

EXAMPLE = (
    "python -m lab refresh-hidden --windows eval/suites/scienceworld-500.jsonl.gz "
    "--out eval/suites/scienceworld-500.jsonl.gz"
)


def read_states(environment: Environment, windows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the windows with `hidden_state` and `hidden_state_start` from the simulator, grouped by world.

    Raises:
        InputError: the simulator does not reproduce a history
    """
    observation: dict[str, dict[str, Any]] = {}
    order = sorted(windows, key=lambda w: (w["task"], str(w["variation"]), _actions(w)))
    for i, window in enumerate(tqdm(order, unit="window")):
        before = order[i - 1] if i else None
        if before is None or (_place(before), _actions(before)) != (_place(window), _actions(window)):
            start, now = _states(environment, window)
        observation[window["id"]] = {**window, "hidden_state": now, "hidden_state_start": start}
    yield from (observation[window["id"]] for window in windows)


def _place(window: Mapping[str, Any]) -> tuple[str, Any]:
    return window["task"], window["variation"]


def _actions(window: Mapping[str, Any]) -> list[str]:
    return [step["action"] or "" for step in window["history"]]


def _states(environment: Environment, window: Mapping[str, Any]) -> tuple[str | None, str | None]:
    history = [Step(step["action"], step["observation"], 0, False) for step in window["history"]]
    start = None
    for index, _ in enumerate(replay(environment, *_place(window), history)):
        if index == 0:
            start = environment.hidden_state()
    return start, environment.hidden_state()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=Path, required=True, help="windows of one environment")
    parser.add_argument("--out", type=Path, required=True, help="NAME.jsonl.gz; may be the same file")


def run(args: argparse.Namespace) -> None:
    windows = read_windows(args.windows)
    with closing(make_environment(windows[0]["env"])) as environment:
        write_windows(args.out, list(read_states(environment, windows)))
