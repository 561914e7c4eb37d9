"""Cut evaluation windows out of episodes: the state now, and the next K actions with their results.

One JSON object a line:

    {"id", "env", "task", "variation", "family", "split", "goal", "history": [{"action", "observation"}, ...] (up to and
     with now; the first action is null), "look", "inventory", "hidden_state" (now, or null), "hidden_state_start" (that
     of the episode's start, or null), "actions": [K], "observations": [K], "rewards": [K] (score differences, in
     points), "dones": [K]}

The episode is drawn first, then the start, so that long episodes do not dominate. `lab/data/cut_suite.py` cuts the
committed suites.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from data_prep.environments import family_of, make_environment
from data_prep.policies import replay_hidden_states
from loopwm.records.command import positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import write_lines

EXAMPLE = "python -m data_prep windows --episodes data/episodes/test-gold --count 50 --out data/windows.jsonl.gz"


@dataclass(frozen=True)
class Cut:
    """Cut of a window after step `now` of an episode."""

    episode: Episode
    now: int
    name: str


def cut_window(cut: Cut, horizon: int, hidden_state: str | None) -> dict[str, Any]:
    """Return the window of `horizon` actions after the cut; `hidden_state` is that of now."""
    episode, now, steps = cut.episode, cut.now, cut.episode.steps
    future = steps[now + 1 : now + 1 + horizon]
    return {
        "id": cut.name,
        "env": episode.env,
        "task": episode.task,
        "variation": episode.variation,
        "family": family_of(episode.env, episode.task),
        "split": episode.split,
        "goal": episode.goal,
        "history": [{"action": step.action, "observation": step.observation} for step in steps[: now + 1]],
        "look": steps[now].look,
        "inventory": steps[now].inventory,
        "hidden_state": hidden_state,
        "hidden_state_start": episode.hidden_state,
        "actions": [step.action for step in future],
        "observations": [step.observation for step in future],
        "rewards": [future[i].score - steps[now + i].score for i in range(horizon)],
        "dones": [step.done for step in future],
    }


def draw_starts(episodes: Sequence[Episode], count: int, horizon: int, rng: Random) -> list[tuple[Episode, int]]:
    """Draw `count` different (episode, start) pairs: the episode uniformly, then the start.

    An episode whose starts are used up is not drawn again. Raises InputError if there are fewer than `count` windows.
    """
    open_starts = [(episode, list(range(len(episode.steps) - horizon))) for episode in episodes]
    open_starts = [(episode, starts) for episode, starts in open_starts if starts]
    if sum(len(starts) for _, starts in open_starts) < count:
        raise InputError(f"episodes must hold {count} windows, found {sum(len(starts) for _, starts in open_starts)}")
    pairs = []
    for _ in range(count):
        index = rng.randrange(len(open_starts))
        episode, starts = open_starts[index]
        pairs.append((episode, starts.pop(rng.randrange(len(starts)))))
        if not starts:
            open_starts.pop(index)
    return pairs


def cut_any(episodes: Sequence[Episode], count: int, horizon: int, seed: int, name: str) -> list[Cut]:
    """Cut windows of all episodes, regardless of family."""
    pairs = draw_starts(episodes, count, horizon, Random(f"{seed}/{name}"))
    return [Cut(episode, now, f"{name}/{i:04d}") for i, (episode, now) in enumerate(pairs)]


def replayed_hidden_states(cuts: Sequence[Cut]) -> dict[str, str | None]:
    """Return hidden states by window from the simulator. Raises InputError if it does not answer as recorded."""
    by_episode: dict[int, list[Cut]] = defaultdict(list)
    for cut in cuts:
        by_episode[id(cut.episode)].append(cut)
    by_window: dict[str, str | None] = {}
    names = sorted({cut.episode.env for cut in cuts})
    if len(names) != 1:
        raise InputError(f"--hidden-state: must be of one environment, got {', '.join(names)}")
    with closing(make_environment(names[0])) as environment:
        for group in tqdm(by_episode.values(), desc="hidden states", unit="episode"):
            states = replay_hidden_states(environment, group[0].episode, {cut.now for cut in group})
            by_window |= {cut.name: states[cut.now] for cut in group}
    return by_window


def read_sorted(paths: Iterable[Path]) -> list[Episode]:
    """Return all episodes in an order independent of their files, except plays of one variation by one policy.

    These stay in reading order: the noisy suites were drawn so, and any other tie-break would draw others.
    """
    return sorted(recorded_episodes(paths), key=lambda e: (e.env, e.task, e.split, str(e.variation).zfill(6), e.policy))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--episodes", nargs="+", type=Path, required=True, help="episode files or folders")
    parser.add_argument("--count", type=positive, required=True, help="number of windows")
    parser.add_argument("--horizon", type=positive, default=5, help="actions a window")
    parser.add_argument("--hidden-state", action="store_true", help="read the hidden states from the simulator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="NAME.jsonl.gz; NAME begins the windows' ids")


def run(args: argparse.Namespace) -> None:
    cuts = cut_any(read_sorted(args.episodes), args.count, args.horizon, args.seed, args.out.name.split(".")[0])
    write_cuts(args.out, cuts, args.horizon, args.hidden_state)


def write_cuts(path: Path, cuts: Sequence[Cut], horizon: int, replayed: bool) -> None:
    """Write the windows of cuts, with the simulator's hidden states or those that were recorded."""
    recorded = {cut.name: cut.episode.hidden_state_at(cut.now) for cut in cuts}
    states = replayed_hidden_states(cuts) if replayed else recorded
    write_windows(path, [cut_window(cut, horizon, states[cut.name]) for cut in cuts])


def write_windows(path: Path, windows: Sequence[Mapping[str, Any]]) -> None:
    write_lines(path, (json.dumps(w, ensure_ascii=False, separators=(",", ":")) for w in windows))
    print(f"{path}: {len(windows)} windows, {path.stat().st_size:,} bytes")
