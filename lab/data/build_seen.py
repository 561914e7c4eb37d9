"""Find the windows of suites that occur in train episodes, and write a table of them for each suite.

A window is seen at horizon k if its last observation, its first k actions and the answer occur word for word in
consecutive steps of one train episode; at other horizons it is unseen. Observations in between are not compared: the
window does not show them either. White space around a text is ignored.

The episodes are read once and compared with the windows, and the table holds only the matches, so that it stays small
(kilobytes) for any training set: an index of the episodes would hold five keys for each of more than a million
transitions. A table is of one suite and one training set, and names both by hash: for a checkpoint, `eval run` uses it
only if the checkpoint was trained on these very episodes. With --model they are selected by the hashes in the
checkpoint, from any others in the folders.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval.scores.seen import Seen, environment_of, table_path
from eval.scores.suites import Suite, load_suite
from lab.data.gzip_bytes import pack_gzip
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic
from loopwm.records.training_episodes import FILE, TrainingEpisodes, digest
from loopwm.records.windows import Window
from loopwm.text.memory import TrainEpisode, read_train_episodes

EXAMPLE = (
    "python -m lab build-seen --episodes data/episodes/train-gold data/episodes/train-noisy "
    "--suites scienceworld-500 scienceworld-500-noisy scienceworld-counterfactual --out eval/data"
)


Place = tuple[str, ...]
"""Environment, an observation, the actions from there, and the observation they lead to."""


def place_of(window: Window, horizon: int) -> Place:
    last, answer = window["history"][-1]["observation"], window["observations"][horizon - 1]
    actions = (action.strip() for action in window["actions"][:horizon])
    return (window["env"], last.strip(), *actions, answer.strip())


@dataclass
class _Episodes:
    """Episodes of one environment in reading order. only: hashes of those that count, once each; None for all."""

    only: frozenset[int] | None
    hashes: set[int] = field(default_factory=set)
    sha256: Any = field(default_factory=hashlib.sha256)
    count: int = 0
    transitions: int = 0

    def add(self, episode: TrainEpisode) -> bool:
        """Return True if the episode counts."""
        if self.only is not None and (episode.hash not in self.only or episode.hash in self.hashes):
            return False
        self.hashes.add(episode.hash)
        self.sha256.update(episode.hashed)
        self.count, self.transitions = self.count + 1, self.transitions + len(episode.steps) - 1
        return True


def build_tables(suites: Sequence[Suite], paths: Iterable[Path], trained: TrainingEpisodes | None = None) -> list[Seen]:
    """Build one table a suite, in order, of its environment's episodes: all, or those of `trained`.

    Raises InputError for episodes outside the train split, and if some of `trained` are missing.
    """
    wanted: dict[Place, list[tuple[int, str, int]]] = defaultdict(list)
    for number, suite in enumerate(suites):
        for window in suite.windows:
            for k in range(1, len(window["actions"]) + 1):
                wanted[place_of(window, k)].append((number, window["id"], k))
    envs = [environment_of(suite) for suite in suites]
    read = {env: _Episodes(trained.episodes(env) if trained else None) for env in envs}
    horizons_seen: list[dict[str, list[int]]] = [{} for _ in suites]
    for place in _met(wanted.keys(), read_train_episodes(paths), read):
        for number, name, k in wanted[place]:
            horizons_seen[number].setdefault(name, []).append(k)
    return [
        _table(suite, read[env], horizons) for suite, env, horizons in zip(suites, envs, horizons_seen, strict=True)
    ]


def _met(wanted: Set[Place], episodes: Iterable[TrainEpisode], read: Mapping[str, _Episodes]) -> set[Place]:
    """Return the wanted places that occur in the episodes that count, and add these episodes to `read`."""
    longest = max(len(place) for place in wanted) - len(("environment", "observation", "answer"))
    starts, met = {place[:2] for place in wanted}, set[Place]()
    for episode in episodes:
        if episode.env in read and read[episode.env].add(episode):
            met |= wanted & set(_places(episode, starts, longest))
    for env, episodes_read in read.items():
        if episodes_read.only is not None and (lacking := len(episodes_read.only - episodes_read.hashes)):
            raise InputError(
                f"--episodes: lack {lacking:,} of the {len(episodes_read.only):,} {env} episodes of --model"
            )
    return met


def _table(suite: Suite, read: _Episodes, horizons: Mapping[str, list[int]]) -> Seen:
    known = (read.sha256.hexdigest(), digest(read.hashes), read.count, read.transitions)
    return Seen(suite.name, suite.sha256, *known, {name: sorted(horizons[name]) for name in sorted(horizons)})


def _places(episode: TrainEpisode, starts: set[Place], longest: int) -> Iterator[Place]:
    """Yield the places of an episode that start like a wanted one, at every horizon."""
    for now, (_, observation) in enumerate(episode.steps):
        start = (episode.env, observation)
        if start in starts:
            actions: Place = ()
            for action, answer in episode.steps[now + 1 : now + 1 + longest]:
                actions += (action,)
                yield (*start, *actions, answer)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, help="train episodes, files or folders")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="checkpoint, to select the episodes it was trained on"
    )
    parser.add_argument("--suites", nargs="+", required=True, help="names of committed suites, or window files")
    parser.add_argument("--out", type=Path, required=True, help="folder for seen-SUITE.json.gz")


def run(args: argparse.Namespace) -> None:
    trained = None if args.model is None else TrainingEpisodes.load(args.model)
    if args.model is not None and trained is None:
        raise InputError(f"--model: {args.model} must have {FILE}, which names its training episodes")
    tables = build_tables([load_suite(name) for name in args.suites], args.episodes, trained)
    for table in tables:
        path = args.out / table_path(table.suite).name
        record = asdict(table)
        record["seen"] = record.pop("horizons")
        write_atomic(path, pack_gzip(json.dumps(record, ensure_ascii=False, separators=(",", ":"))))
        print(f"{path}: {len(table.horizons)} windows seen at some horizon in {table.transitions} transitions")
