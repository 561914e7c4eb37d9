"""Cut probe windows: a start at a place of other windows' histories, and the probes of one kind that follow it.

The family of a window is the kind of its probes, so that reports have a row a kind. A window's history is replayed up
to a random place, and the simulator answers the probes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from data_prep.environments import declared, make_environment
from data_prep.environments.base import Environment
from data_prep.policies import choices_in, replay
from data_prep.windows import write_windows
from lab.data.collect_probes import PROBERS, act_one_kind
from lab.data.cut_suite import read_windows
from lab.data.probes import KINDS
from loopwm.records.episodes import Step
from loopwm.records.errors import InputError

EXAMPLE = (
    "python -m lab probe-windows --windows eval/suites/scienceworld-500.jsonl.gz "
    "--out eval/suites/scienceworld-probe.jsonl.gz"
)

AT_START = 0.2
"""Share of windows that start with the episode; the others start at any place of the history with equal chance."""

DISTINCT = 3
"""Least number of different answers in a window."""

TRIES = 8
"""Draws from a window before the next window."""


def probe_window(
    environment: Environment, window: Mapping[str, Any], kind: str, horizon: int, name: str, rng: Random
) -> dict[str, Any] | None:
    """Return a window of probes at a place of another window's history, after a look about.

    Returns None if the episode ends in it, if it is not answerable, or if it does not test permanence.

    Raises InputError if the simulator does not reproduce the history.
    """
    # the simulator waits for a number, which is not a probe
    places = [i for i, step in enumerate(window["history"]) if not choices_in(step["observation"])]
    now = 0 if rng.random() < AT_START else rng.choice(places)
    recorded = [Step(step["action"], step["observation"], 0, False) for step in window["history"][: now + 1]]
    history = list(replay(environment, window["task"], window["variation"], recorded))
    history += [environment.step(look) for look in environment.looks]
    steps = [replace(history[-1], hidden_state=environment.hidden_state())]
    probes = act_one_kind(environment, kind, steps[0], rng)
    action = next(probes)
    while len(steps) <= horizon and not steps[-1].done:
        step = environment.step(action)
        steps.append(replace(step, hidden_state=environment.hidden_state()))
        action = probes.send(step)
    future = steps[1:]
    if len(future) < horizon or not is_answerable(environment.name, (window["goal"], *texts_of(history)), future):
        return None
    if kind == "permanence" and not ends_in_look_at_change(steps):
        return None
    if len({step.observation for step in future}) < DISTINCT:
        return None
    return {
        **window,
        "id": name,
        "family": kind,
        "history": [{"action": step.action, "observation": step.observation} for step in history],
        "look": steps[0].look,
        "inventory": steps[0].inventory,
        "hidden_state": steps[0].hidden_state,
        "actions": [step.action for step in future],
        "observations": [step.observation for step in future],
        "rewards": [after.score - before.score for before, after in pairwise(steps)],
        "dones": [step.done for step in future],
    }


def ends_in_look_at_change(steps: Sequence[Step]) -> bool:
    """Return True if some action changed the world, not only the place in it, and the last one changed nothing."""
    states = [(step.look, step.inventory) for step in steps]
    worlds = {(step.hidden_state, step.inventory) for step in steps}
    return len(worlds) > 1 and len(set(states)) > 1 and states[-1] == states[-2]


def texts_of(steps: Iterable[Step]) -> Iterator[str]:
    return (text for step in steps for text in (step.action, step.observation) if text)


def is_answerable(env: str, context: Iterable[str], future: Sequence[Step]) -> bool:
    """Return True if no answer names or lists anything that neither the context nor an action up to it does.

    A first look into a cupboard is a guess, and guesses would hide a model's knowledge of its own actions.
    """
    names = declared(env).names
    assert names is not None
    before, actions, answers = list(context), [step.action or "" for step in future], [s.observation for s in future]
    facts = declared(env).facts([*before, *actions, *answers])
    known = frozenset[str]().union(*map(names.mentioned, before))
    shown = frozenset[str]().union(*(text.shows for text in facts[: len(before)]))
    of_actions, of_answers = facts[len(before) : -len(future)], facts[-len(future) :]
    for action, answer, action_facts, answer_facts in zip(actions, answers, of_actions, of_answers, strict=True):
        known |= names.mentioned(action)
        shown |= action_facts.shows
        if not names.named(answer) <= known or any(shown.isdisjoint(need.facts) for need in answer_facts.needs):
            return False
    return True


def families_in_turn(windows: Sequence[Mapping[str, Any]], rng: Random) -> Iterator[Mapping[str, Any]]:
    """Yield all windows once, one of each family in turn until a family is used up."""
    by_family: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for window in windows:
        by_family[window["family"]].append(window)
    for group in by_family.values():
        rng.shuffle(group)
    while by_family:
        for family in sorted(by_family):
            yield by_family[family].pop()
            if not by_family[family]:
                del by_family[family]


def cut_probes(
    environment: Environment, windows: Sequence[Mapping[str, Any]], count: int, horizon: int, seed: int, name: str
) -> Iterator[dict[str, Any]]:
    """Yield up to `count` windows, the kinds in turn."""
    cut = 0
    for source in families_in_turn(windows, Random(f"{seed}/{name}")):
        kind = KINDS[cut % len(KINDS)]
        id_ = f"{name}/{kind.replace(' ', '-')}/{cut // len(KINDS):04d}"
        rng = Random(f"{seed}/{name}/{source['id']}")
        tried = (probe_window(environment, source, kind, horizon, id_, rng) for _ in range(TRIES))
        window = next(filter(None, tried), None)
        if window is not None:
            yield window
            cut += 1
        if cut == count:
            return


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=Path, required=True, help="windows of one environment, played by its solver")
    parser.add_argument("--count", type=int, default=200, help="windows")
    parser.add_argument("--horizon", type=int, default=5, help="actions a window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="NAME.jsonl.gz; NAME begins the windows' ids")


def run(args: argparse.Namespace) -> None:
    if min(args.count, args.horizon) < 1:
        raise InputError("--count, --horizon: must be >= 1")
    windows = read_windows(args.windows)
    name = args.out.name.split(".")[0]
    with closing(make_environment(windows[0]["env"])) as environment:
        if environment.name not in PROBERS:
            raise InputError(f"{args.windows}: {environment.name} has no probes")
        probes = cut_probes(environment, windows, args.count, args.horizon, args.seed, name)
        cut = list(tqdm(probes, total=args.count, unit="window", mininterval=10))
    if len(cut) < args.count:
        raise InputError(f"{args.windows}: found {len(cut)} windows, --count is {args.count}")
    write_windows(args.out, cut)
