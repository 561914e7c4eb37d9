"""Measure state sufficiency: how often equal states and actions have equal observations.

A place is a step with a recorded hidden state and an action after it. Its state is that of the context `full`: goal,
look, inventory and hidden state. Places of equal state and action form a group; of groups of two or more, those with
one observation agree. Places reached by the same actions in the same variation count once: a simulator is
deterministic, so they would agree whatever the state omits.

Columns: groups; places in them; share of places whose group agrees; share of groups that agree, and its 95 % Wilson
interval (Wilson, 1927) over groups, since the places of a group are not independent.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from tqdm import tqdm

from data_prep.environments import family_of
from lab.data.hidden_lines import unreadable_line
from loopwm.records.episodes import Episode, read_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import line_files

EXAMPLE = "python -m lab state-sufficiency --episodes data/episodes/train --examples 1"

Z = NormalDist().inv_cdf(0.975)

COLUMNS = ("environment", "family", "groups", "places", "places agree", "groups agree", "95 % interval")


class Answer(NamedTuple):
    """Place of an answer: file, line of the episode, and the step before it; `answer` is its digest."""

    answer: bytes
    file: int
    line: int
    step: int


Groups = dict[bytes, list[Answer]]
"""Places by digest of state and action."""


@dataclass
class Agreement:
    """Counts over groups of at least two places."""

    groups: int = 0
    places: int = 0
    agreeing_groups: int = 0
    agreeing_places: int = 0

    def add(self, places: Sequence[Answer]) -> None:
        agrees = not disagree(places)
        self.groups += 1
        self.places += len(places)
        self.agreeing_groups += agrees
        self.agreeing_places += agrees * len(places)

    def row(self) -> list[str]:
        if not self.groups:
            return ["0", "0", "-", "-", "-"]
        low, high = wilson_interval(self.agreeing_groups, self.groups)
        shares = (self.agreeing_places / self.places, self.agreeing_groups / self.groups)
        return [f"{self.groups:,}", f"{self.places:,}", *(f"{s:.2%}" for s in shares), f"{low:.2%} to {high:.2%}"]


def disagree(places: Sequence[Answer]) -> bool:
    return len({place.answer for place in places}) > 1


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson, 1927). `trials` must be at least 1."""
    share, z2 = successes / trials, Z * Z
    middle = share + z2 / (2 * trials)
    width = Z * (share * (1 - share) / trials + z2 / (4 * trials**2)) ** 0.5
    return (middle - width) / (1 + z2 / trials), (middle + width) / (1 + z2 / trials)


def group_places(files: Sequence[Path]) -> dict[tuple[str, str], Groups]:
    """Group places by environment and family.

    Raises:
        InputError: a hidden state is malformed (the message names file, line and step), or there is none
    """
    groups: dict[tuple[str, str], Groups] = defaultdict(lambda: defaultdict(list))
    known: set[int] = set()
    for index, path in enumerate(tqdm(files, unit="file", desc="determined")):
        for line, episode in enumerate(read_episodes(path), start=1):
            for step in _new_places(episode, known):
                if fault := _fault(episode, step):
                    raise InputError(f"{path}: line {line}: hidden_state after step {step}: {fault}")
                state, answer = _state(episode, step), episode.steps[step + 1].observation
                place = Answer(_digest([answer]), index, line, step)
                groups[episode.env, family_of(episode.env, episode.task)][_digest(state)].append(place)
    if not groups:
        raise InputError("--episodes: no step with an action after it has a hidden state")
    return {name: dict(groups) for name, groups in sorted(groups.items())}


def _new_places(episode: Episode, known: set[int]) -> Iterator[int]:
    """Yield steps with a hidden state whose action no earlier episode took after the same actions.

    Histories are stored as 64-bit hashes: collisions among millions are negligible.
    """
    path = hash((episode.env, episode.task, episode.variation, episode.split))
    for step, after in enumerate(episode.steps[1:]):
        path = hash((path, after.action))
        if path not in known and episode.hidden_state_at(step) is not None:
            known.add(path)
            yield step


def _fault(episode: Episode, step: int) -> str | None:
    hidden = episode.hidden_state_at(step) or ""
    if not hidden.strip():
        return "empty"
    line = unreadable_line(episode.env, hidden)
    return None if line is None else f"not a line of one: {line[:60]!r}"


def _state(episode: Episode, step: int) -> tuple[str | None, ...]:
    now = episode.steps[step]
    action = episode.steps[step + 1].action
    return episode.env, episode.goal, now.look, now.inventory, episode.hidden_state_at(step), action


def _digest(texts: Iterable[str | None]) -> bytes:
    return blake2b(repr(tuple(texts)).encode(), digest_size=16).digest()


def render(by_family: dict[tuple[str, str], Groups]) -> str:
    """Render one row per family and per environment as Markdown."""
    rows: dict[tuple[str, str], Agreement] = defaultdict(Agreement)
    for (env, family), groups in by_family.items():
        rows[env, family] = Agreement()
        for places in groups.values():
            if len(places) > 1:
                rows[env, family].add(places)
                rows[env, "all"].add(places)
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- | --- |" + " ---: |" * (len(COLUMNS) - 2)]
    lines += [f"| {env} | {family} | {' | '.join(row.row())} |" for (env, family), row in sorted(rows.items())]
    return "\n".join(lines)


def describe_group(files: Sequence[Path], places: Sequence[Answer]) -> str:
    """Describe a group: its state and action, and each answer with its places."""
    answers: dict[str, list[str]] = defaultdict(list)
    for place in places:
        episode = next(islice(read_episodes(files[place.file]), place.line - 1, None))
        answers[episode.steps[place.step + 1].observation].append(
            f"{files[place.file]}: line {place.line}, after step {place.step}"
        )
    _, goal, look, inventory, hidden, action = _state(episode, place.step)
    state = {"goal": goal, "look": look, "inventory": inventory, "hidden state": hidden, "action": action}
    parts = [f"{name}:\n{_indented(text or '-')}" for name, text in state.items()]
    parts += [f"answer ({', '.join(where)}):\n{_indented(text)}" for text, where in answers.items()]
    return "\n".join(parts)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", nargs="+", type=Path, required=True, help="episode files or folders")
    parser.add_argument("--examples", type=int, default=0, help="show this many disagreeing groups of each family")


def run(args: argparse.Namespace) -> None:
    if args.examples < 0:
        raise InputError("--examples: at least 0")
    files = line_files(args.episodes)
    by_family = group_places(files)
    print(render(by_family))
    for (env, family), groups in by_family.items():
        disagreeing = filter(disagree, groups.values())
        for places in islice(disagreeing, args.examples):
            print(f"\n{env}, {family}: {len(places)} places\n{describe_group(files, places)}")
