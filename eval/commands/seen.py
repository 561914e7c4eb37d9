"""Find out which windows of suites stand in train episodes, and write a table beside each suite's name.

A window is seen at horizon k where its last observation, its first k actions and the answer stand word for word in
consecutive steps of one train episode; at other horizons it is novel. What was observed between is not compared: the
window does not show it either. Only white space around a text is left out.

The episodes are read once and compared with what the windows ask for, and the table holds the answers alone, so that it
stays small (kilobytes) however much there is to train on: an index of the episodes themselves would hold five keys for
each of more than a million transitions. A table is of one suite and one training set, and names both by hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from eval.models.train_episodes import TrainEpisode, read_train_episodes
from eval.scores.seen import Place, Seen, place_of, table_path
from eval.scores.suites import Suite, load_suite
from loopwm.records.files import pack_gzip, write_atomic

EXAMPLE = (
    "python -m eval build-seen --episodes data/episodes/train-gold data/episodes/train-noisy "
    "--suites scienceworld-500 scienceworld-500-noisy scienceworld-counterfactual --out eval/data"
)


def build_tables(suites: Sequence[Suite], paths: Iterable[Path]) -> list[Seen]:
    """A table a suite, in order. Raises InputError for episodes that are not of the train split."""
    wanted: dict[Place, list[tuple[int, str, int]]] = defaultdict(list)
    for number, suite in enumerate(suites):
        for window in suite.windows:
            for k in range(1, len(window["actions"]) + 1):
                wanted[place_of(window, k)].append((number, window["id"], k))
    longest = max(len(window["actions"]) for suite in suites for window in suite.windows)
    starts = {place[:2] for place in wanted}
    met: set[Place] = set()
    digest, episodes, transitions = hashlib.sha256(), 0, 0
    for episode in read_train_episodes(paths):
        digest.update(episode.hashed)
        episodes, transitions = episodes + 1, transitions + len(episode.steps) - 1
        met |= wanted.keys() & set(_places(episode, starts, longest))
    seen: list[dict[str, list[int]]] = [{} for _ in suites]
    for place in met:
        for number, name, k in wanted[place]:
            seen[number].setdefault(name, []).append(k)
    ordered = [{name: sorted(found[name]) for name in sorted(found)} for found in seen]
    read = (digest.hexdigest(), episodes, transitions)
    return [Seen(suite.name, suite.sha256, *read, found) for suite, found in zip(suites, ordered, strict=True)]


def _places(episode: TrainEpisode, starts: set[Place], longest: int) -> Iterator[Place]:
    """The places of an episode that start like one that is wanted, at every horizon."""
    for now, (_, observation) in enumerate(episode.steps):
        start = (episode.env, observation)
        if start in starts:
            actions: Place = ()
            for action, answer in episode.steps[now + 1 : now + 1 + longest]:
                actions += (action,)
                yield (*start, *actions, answer)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", type=Path, nargs="+", required=True, help="train episodes, files or folders")
    parser.add_argument("--suites", nargs="+", required=True, help="names of committed suites, or window files")
    parser.add_argument("--out", type=Path, required=True, help="folder for seen-SUITE.json.gz")


def run(args: argparse.Namespace) -> None:
    tables = build_tables([load_suite(name) for name in args.suites], args.episodes)
    for table in tables:
        path = args.out / table_path(table.suite).name
        write_atomic(path, pack_gzip(json.dumps(asdict(table), ensure_ascii=False, separators=(",", ":"))))
        print(f"{path}: {len(table.seen)} windows seen at some horizon in {table.transitions} transitions")
