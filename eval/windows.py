"""Windows, the unit of evaluation: reading, checking and sampling them.

A window file (`.jsonl`, `.jsonl.gz`, `.jsonl.xz`) holds one JSON object a line:

    {"id", "env", "task", "variation", "family", "split", "goal", "history": [{"action", "observation"}, ...] (up to and
     with now), "look", "inventory", "hidden_state", "hidden_state_start", "actions": [K strings], "observations": [K],
     "rewards": [K], "dones": [K]}

`history[0].action` is null: it is the first observation. `look`, `inventory` and `hidden_state` describe now,
`hidden_state_start` the start of the episode; each may be null, and so may `variation` (a number, or a game's name).
Horizon k takes the first k actions and scores `observations[k - 1]`. Two windows whose ids end in `/fact` and
`/counterfact` after the same name are a pair.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, cast

from eval.files import read_json_lines, sha256
from eval.selections import SELECTIONS
from loopwm.records.errors import InputError
from loopwm.text.format import FormatError, Regime, StateSlots, render_prompt, window_context

SUITES = Path(__file__).parent / "suites"
NULLABLE = ("look", "inventory", "hidden_state", "hidden_state_start")
FACT, COUNTERFACT = "/fact", "/counterfact"
_FUTURE = {"actions": (str,), "observations": (str,), "rewards": (int, float), "dones": (bool,)}


class HistoryStep(TypedDict):
    action: str | None
    observation: str


class Window(TypedDict):
    id: str
    env: str
    task: str
    variation: int | str | None
    family: str
    split: str
    goal: str
    history: list[HistoryStep]
    look: str | None
    inventory: str | None
    hidden_state: str | None
    hidden_state_start: str | None
    actions: list[str]
    observations: list[str]
    rewards: list[float]
    dones: list[bool]


@dataclass(frozen=True)
class Suite:
    """A window file: its short name, the hash of its bytes, and its windows in order."""

    name: str
    sha256: str
    windows: tuple[Window, ...]


def suite_names() -> list[str]:
    """The committed suites, sorted."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in SUITES.glob("*.jsonl.gz"))


def load_suite(name_or_path: str) -> Suite:
    """A committed suite by name, or any window file by path; `NAME:SELECTION` takes those of its windows alone.

    Raises InputError naming file, line and field, or a selection that there is not.
    """
    name, colon, selection = name_or_path.rpartition(":")
    if not colon or Path(name_or_path).is_file():
        return _read_suite(name_or_path)
    return _select(_read_suite(name), selection)


def _select(suite: Suite, selection: str) -> Suite:
    """A suite with a name and a hash of its own, so that no figure of it passes for one of the whole suite."""
    if selection not in SELECTIONS:
        raise InputError(f"--suite: unknown selection {selection!r}, expected one of {', '.join(SELECTIONS)}")
    chosen = tuple(w for w in suite.windows if SELECTIONS[selection].holds(w["env"], w["family"]))
    if not chosen:
        raise InputError(f"--suite: {suite.name!r} holds no windows of {selection!r}")
    ids = "\n".join(window["id"] for window in chosen)
    return Suite(f"{suite.name}:{selection}", sha256(f"{suite.sha256}\n{ids}"), chosen)


def _read_suite(name_or_path: str) -> Suite:
    path = SUITES / f"{name_or_path}.jsonl.gz"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        known = ", ".join(suite_names()) or "none"
        raise InputError(f"--suite: {name_or_path!r} is neither a file nor a committed suite ({known})")
    windows = tuple(check_window(record, f"{path}: line {line}") for line, record in read_json_lines(path))
    if not windows:
        raise InputError(f"{path}: holds no windows")
    _check_unique(windows, path)
    return Suite(path.name.split(".jsonl")[0], sha256(path.read_bytes()), windows)


def _check_unique(windows: Sequence[Window], path: Path) -> None:
    seen: set[str] = set()
    for window in windows:
        if window["id"] in seen:
            raise InputError(f"{path}: id: {window['id']!r} occurs twice")
        seen.add(window["id"])


def check_window(record: dict[str, Any], where: str) -> Window:
    """The record as a window. Raises InputError, led by `where`, naming the first field at fault."""
    for fault in window_faults(record):
        raise InputError(f"{where}: {fault}")
    for field in (*NULLABLE, "variation"):
        record.setdefault(field, None)
    return cast(Window, record)


def window_faults(record: Mapping[str, Any]) -> Iterator[str]:
    """What keeps a record from being a window, one line a field at fault."""
    for field in ("id", "env", "task", "family", "split", "goal"):
        yield from _faults_of(record, field, str)
    for field in NULLABLE:
        if record.get(field) is not None:
            yield from _faults_of(record, field, str)
    if record.get("variation") is not None:
        yield from _faults_of(record, "variation", int | str)
    yield from _history_faults(record)
    yield from _future_faults(record)


def _history_faults(record: Mapping[str, Any]) -> Iterator[str]:
    yield from (faults := list(_faults_of(record, "history", list)))
    if faults:
        return
    if not record["history"]:
        yield "history: at least the first observation is needed"
    for i, step in enumerate(record["history"]):
        if not isinstance(step, dict):
            yield f"history[{i}]: expected an object"
            continue
        yield from _faults_of(step, "observation", str, f"history[{i}].")
        if i == 0 and step.get("action") is not None:
            yield "history[0].action: must be null, it is the first observation"
        if i > 0:
            yield from _faults_of(step, "action", str, f"history[{i}].")
            if isinstance(step.get("action"), str) and not step["action"].strip():
                yield f"history[{i}].action: must not be empty"


def _future_faults(record: Mapping[str, Any]) -> Iterator[str]:
    lengths = {field: len(record[field]) for field in _FUTURE if isinstance(record.get(field), list)}
    for field, kinds in _FUTURE.items():
        yield from _faults_of(record, field, list)
        for i, value in enumerate(record[field] if field in lengths else ()):
            if type(value) not in kinds:
                yield f"{field}[{i}]: unexpected {type(value).__name__}"
            elif field == "actions" and not value.strip():
                yield f"actions[{i}]: must not be empty"
    if lengths.get("actions") == 0:
        yield "actions: at least one action is needed"
    for field, length in lengths.items():
        if "actions" in lengths and length != lengths["actions"]:
            yield f"{field}: has {length} entries, actions has {lengths['actions']}"


def _faults_of(record: Mapping[str, Any], field: str, kind: type | UnionType, prefix: str = "") -> Iterator[str]:
    if field not in record:
        yield f"{prefix}{field}: missing"
    elif not isinstance(record[field], kind):
        yield f"{prefix}{field}: unexpected {type(record[field]).__name__}"


def question(window: Window, regime: Regime, horizon: int) -> str:
    """What a window asks at a horizon, as one string that records are told apart by.

    Always in the same template, whatever the model reads: records of older models stay comparable.
    """
    return render_prompt(window_context(window, regime), window["actions"][:horizon], StateSlots(in_trunk=False))


def game_of(window: Window) -> str:
    """The game that a window was cut from: windows of one are alike, and are drawn together in intervals.

    Where a file does not tell the variation, every window (every pair) counts as a game of its own.
    """
    if window["variation"] is None:
        return pair_of(window["id"])
    return f"{window['env']}/{window['task']}/{window['variation']}"


def pair_of(name: str) -> str:
    """The pair's name in a window's id, or the whole id."""
    return name.removesuffix(FACT).removesuffix(COUNTERFACT)


def check_horizons(windows: Sequence[Window], horizons: Sequence[int]) -> None:
    """Raises InputError naming the first window that is shorter than a horizon."""
    longest = max(horizons)
    for window in windows:
        if len(window["actions"]) < longest:
            length = len(window["actions"])
            raise InputError(f"window {window['id']}: actions: has {length}, --horizons asks for {longest}")


def refusal(window: Window, regime: Regime) -> str | None:
    """Why a window cannot be shown in the regime, naming the field that it lacks; None where it can."""
    try:
        window_context(window, regime)
    except FormatError as error:
        return str(error)
    return None


def check_runnable(windows: Sequence[Window], regime: Regime, horizons: Sequence[int]) -> None:
    """Raises InputError naming the first window that is shorter than a horizon or lacks a field the regime needs."""
    check_horizons(windows, horizons)
    for window in windows:
        if (reason := refusal(window, regime)) is not None:
            raise InputError(f"window {window['id']}: {reason}")


def stratified_sample(windows: Sequence[Window], limit: int, seed: int) -> list[Window]:
    """`limit` windows in file order, drawn with the seed; families keep their shares (largest remainders round up).

    Pairs are drawn whole, at least one: of a file of pairs an odd limit gives one window less.
    """
    if limit >= len(windows):
        return list(windows)
    families: dict[str, dict[str, None]] = defaultdict(dict)
    for window in windows:
        families[window["family"]][pair_of(window["id"])] = None
    sizes = {family: len(pairs) for family, pairs in families.items()}
    quotas = _quotas(sizes, max(1, limit * sum(sizes.values()) // len(windows)))
    chosen: set[str] = set()
    for family, pairs in families.items():
        chosen.update(random.Random(f"{seed}/{family}").sample(list(pairs), quotas[family]))
    return [window for window in windows if pair_of(window["id"]) in chosen]


def _quotas(sizes: dict[str, int], limit: int) -> dict[str, int]:
    """Whole numbers near size * limit / total that sum to `limit`."""
    total = sum(sizes.values())
    quotas = {family: size * limit // total for family, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda family: (-(sizes[family] * limit % total), family))
    for family in by_remainder[: limit - sum(quotas.values())]:
        quotas[family] += 1
    return quotas
