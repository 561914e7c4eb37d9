"""Windows, the unit of evaluation: checking and sampling them.

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

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, TypedDict, cast

from loopwm.records.errors import InputError
from loopwm.records.files import LONE_SURROGATE
from loopwm.records.template import ContextKind, FormatError, StateSlots, render_prompt, window_context

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


def check_window(record: dict[str, Any], where: str) -> Window:
    """Check a record. Raises InputError, led by `where`, naming the first field at fault."""
    for fault in window_faults(record):
        raise InputError(f"{where}: {fault}")
    for field in (*NULLABLE, "variation"):
        record.setdefault(field, None)
    return cast(Window, record)


def window_faults(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of a record, one line a field."""
    for field in ("id", "env", "task", "family", "split", "goal"):
        yield from _faults_of(record, field, str)
    for field in NULLABLE:
        if record.get(field) is not None:
            yield from _faults_of(record, field, str)
    if record.get("variation") is not None:
        yield from _faults_of(record, "variation", int | str)
    yield from _history_faults(record)
    yield from _future_faults(record)
    if LONE_SURROGATE.search(json.dumps(record, ensure_ascii=False)):
        yield "must be valid Unicode, got a lone surrogate"


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
            elif field == "rewards" and not abs(value) < math.inf:
                yield f"rewards[{i}]: must be a finite number, got {value}"
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


def question(window: Window, context_kind: ContextKind, horizon: int) -> str:
    """Return the question of a window at a horizon as one string, which identifies records.

    Always in the same template, so that records of older models stay comparable.
    """
    return render_prompt(window_context(window, context_kind), window["actions"][:horizon], StateSlots(in_trunk=False))


def game_of(window: Window) -> str:
    """Return the game that a window was cut from; intervals resample games, since windows of one are alike.

    Without a variation every window (every pair) is a game of its own.
    """
    if window["variation"] is None:
        return f"{window['env']}/{pair_of(window['id'])}"
    return f"{window['env']}/{window['task']}/{window['variation']}"


def pair_of(name: str) -> str:
    """Return the pair's name in a window's id, or the whole id."""
    return name.removesuffix(FACT).removesuffix(COUNTERFACT)


def check_horizons(windows: Sequence[Window], horizons: Sequence[int]) -> None:
    """Raise InputError naming the first window that is shorter than a horizon."""
    longest = max(horizons)
    for window in windows:
        if (length := len(window["actions"])) < longest:
            raise InputError(f"window {window['id']}: actions: has {length}, --horizons asks for {longest}")


def refusal(window: Window, context_kind: ContextKind) -> str | None:
    """Return the reason why a window cannot be shown in the context, naming the missing field; None if it can."""
    try:
        window_context(window, context_kind)
    except FormatError as error:
        return str(error)
    return None


def check_runnable(windows: Sequence[Window], context_kind: ContextKind, horizons: Sequence[int]) -> None:
    """Raise InputError naming the first window that is shorter than a horizon or lacks a field the context requires."""
    check_horizons(windows, horizons)
    for window in windows:
        if (reason := refusal(window, context_kind)) is not None:
            raise InputError(f"window {window['id']}: {reason}")


def stratified_sample(windows: Sequence[Window], limit: int, seed: int) -> list[Window]:
    """Draw `limit` windows with the seed, in file order; families keep their shares (largest remainders round up).

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
    """Round size * limit / total to whole numbers that sum to `limit`."""
    total = sum(sizes.values())
    quotas = {family: size * limit // total for family, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda family: (-(sizes[family] * limit % total), family))
    for family in by_remainder[: limit - sum(quotas.values())]:
        quotas[family] += 1
    return quotas
