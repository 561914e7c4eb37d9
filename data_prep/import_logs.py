"""Import logs of your own environment as episodes, split into train, dev and test by seed or goal.

Two forms of JSON Lines are read, also compressed as .gz or .xz:

    {"goal": "...", "steps": [{"observation": "..."}, {"action": "...", "observation": "...", "reward": 1}, ...]}
    {"messages": [{"role": "system", "content": GOAL}, {"role": "user", "content": OBSERVATION},
                  {"role": "assistant", "content": ACTION}, {"role": "user", "content": OBSERVATION}, ...]}

The first step has no action. `reward`, `done`, `look` and `inventory` of a step are optional, as are `task` and `seed`
of an episode; a goal that is not given by a system message is the first user message. Give a `seed` (a whole number) if
different worlds share a goal: the split is then by seed. Imported episodes are read too. Episodes that cannot be
learned from are dropped and counted; a line in another form ends the import, and nothing is written.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

from data_prep.environments import family_of
from loopwm.records.episodes import TRAIN_SPLITS, Episode, Step, format_episode, to_episode, write_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import LONE_SURROGATE, line_files, read_json_lines

EXAMPLE = "python -m data_prep import --logs logs.jsonl --env shop --out data/logs"

SPLITS = ("train", "dev", "test")
POLICY = "logs"


class DroppedError(ValueError):
    """Reason to drop an episode."""


def read_log(record: Mapping[str, Any], env: str) -> Episode:
    """Return the episode of a line; that of a log is in the split `train`.

    Raises InputError naming a field that is missing or of another type, and DroppedError for an episode without a step,
    or with a blank or unencodable text.
    """
    episode = to_episode(record) if is_episode(record) else _of_log(record, env)
    family_of(episode.env, episode.task)  # refuses a task that an environment with tasks of its own does not have
    if len(episode.steps) < 2:
        raise DroppedError("no step after the first observation")
    texts = [text for step in episode.steps for text in (step.action, step.observation) if text is not None]
    if not all(text.strip() for text in (episode.goal, *texts)):
        raise DroppedError("blank goal, action or observation")
    if LONE_SURROGATE.search(format_episode(episode)):
        raise DroppedError("text that is not valid Unicode (a lone surrogate)")
    if episode.split not in (*TRAIN_SPLITS, *SPLITS):
        raise DroppedError(f"split {episode.split!r}, which is none of {', '.join(SPLITS)}")
    return episode


def is_episode(record: Mapping[str, Any]) -> bool:
    """Return True if a line is an episode, as `loopwm import` and `collect` write them; it has a split."""
    return "policy" in record and "split" in record


def _of_log(record: Mapping[str, Any], env: str) -> Episode:
    goal, steps = _of_messages(record) if "messages" in record else _of_steps(record)
    # Lone surrogates pass here: `read_log` drops such episodes.
    beginning = f"{goal}\0{steps[0].observation if steps else ''}".encode(errors="surrogatepass")
    seed = _field(record, "seed", int) if "seed" in record else hashlib.sha256(beginning).hexdigest()[:16]
    return Episode(env, _field(record, "task", str, env), seed, SPLITS[0], POLICY, goal, tuple(steps))


def _of_steps(record: Mapping[str, Any]) -> tuple[str, list[Step]]:
    steps: list[Step] = []
    score = 0.0
    for i, step in enumerate(_field(record, "steps", list)):
        place = f"steps[{i}]."
        if not isinstance(step, dict):
            raise InputError(f"{place[:-1]}: must be an object, got {type(step).__name__}")
        action = _field(step, "action", str, prefix=place) if i else None
        if i == 0 and step.get("action") is not None:
            raise InputError(f"{place}action: must be absent or null in the first step, which only observes")
        if not abs(reward := _field(step, "reward", (int, float), 0.0, place)) < 1e9:
            raise InputError(f"{place}reward: must be a number below 1e9 in size")
        score += reward
        done = _field(step, "done", bool, False, place)
        observation = _field(step, "observation", str, prefix=place)
        look, inventory = (_field(step, name, (str, type(None)), prefix=place) for name in ("look", "inventory"))
        steps.append(Step(action, observation, score, done, look, inventory))
    return _field(record, "goal", str), steps


def _of_messages(record: Mapping[str, Any]) -> tuple[str, list[Step]]:
    messages = []
    for i, message in enumerate(_field(record, "messages", list)):
        place = f"messages[{i}]."
        if not isinstance(message, dict):
            raise InputError(f"{place[:-1]}: must be an object, got {type(message).__name__}")
        messages.append((_field(message, "role", str, prefix=place), _field(message, "content", str, prefix=place)))
    turns = list(dropwhile(lambda message: message[0] == "system", messages))  # a later one is no part of the goal
    goal = "\n".join(content for _, content in messages[: len(messages) - len(turns)])
    if not goal and turns:
        goal = turns.pop(0)[1] if [role for role, _ in turns[:2]] == ["user", "user"] else turns[0][1]
    for i, (role, _) in enumerate(turns):
        if role != ("user", "assistant")[i % 2]:
            raise DroppedError(f"user and assistant do not alternate: {role} at turn {i + 1}")
    texts = [content for _, content in turns]
    actions = [None, *texts[1::2]]
    return goal, [Step(action, text, 0.0, False) for action, text in zip(actions, texts[::2], strict=False)]


def _field(record: Mapping[str, Any], name: str, types: Any, default: Any = None, prefix: str = "") -> Any:
    """Return a field. Raises InputError for one of another type, or a missing one without a default."""
    value = record.get(name, default)
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):  # bool is an int
        expected = " or ".join(kind.__name__ for kind in (types if isinstance(types, tuple) else (types,)))
        actual = type(value).__name__ if name in record else "nothing"
        raise InputError(f"{prefix}{name}: must be {expected}, got {actual}")
    return value


def group_of(episode: Episode) -> str:
    """Return the seed of an episode, or its goal: episodes of one group are in one split, since they resemble."""
    return str(episode.variation) if isinstance(episode.variation, int) else episode.goal


def split_of(group: str, shares: Mapping[str, float], seed: int) -> str:
    """Return the split of a group.

    Args:
        group: as `group_of` names it.
        shares: of the held-out splits, by name.
        seed: that a different assignment follows from.
    """
    place = int.from_bytes(hashlib.sha256(f"{seed}/{group}".encode()).digest()[:8]) / 2**64
    for name, share in shares.items():
        if place < share:
            return name
        place -= share
    return SPLITS[0]


def import_logs(
    paths: Iterable[Path], env: str, shares: Mapping[str, float], seed: int
) -> tuple[dict[str, list[Episode]], Counter[str]]:
    """Return the episodes of log files by split, and how many were dropped by reason, with the first place of each.

    Raises InputError naming file, line and field.
    """
    episodes: dict[str, list[Episode]] = defaultdict(list)
    dropped: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    lines = ((path, *line) for path in line_files(paths) for line in read_json_lines(path))
    for path, number, record in lines:
        try:
            episode = read_log(record, env)
        except InputError as error:
            raise InputError(f"{path}: line {number}: {error}") from error
        except DroppedError as reason:
            dropped[reasons.setdefault(str(reason), f"{reason} (first: {path}: line {number})")] += 1
            continue
        split = episode.split if is_episode(record) else split_of(group_of(episode), shares, seed)
        split = SPLITS[0] if split in TRAIN_SPLITS else split
        episodes[split].append(replace(episode, split=split))
    return dict(episodes), dropped


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logs", nargs="+", type=Path, required=True, help="files or folders of logs")
    parser.add_argument("--env", required=True, help="name of your environment")
    parser.add_argument("--dev", type=float, default=0.1, metavar="SHARE", help="of goals or seeds to tune on")
    parser.add_argument(
        "--test", type=float, default=0.1, metavar="SHARE", help="of goals or seeds to evaluate on once"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the splits")


def read_shares(args: argparse.Namespace) -> dict[str, float]:
    """Return the shares of the held-out splits. Raises InputError."""
    shares = {"dev": args.dev, "test": args.test}
    if not (min(shares.values()) >= 0 and sum(shares.values()) < 1):
        raise InputError(f"--dev, --test: must be shares of at least 0 with a sum below 1, got {args.dev}, {args.test}")
    return shares


def read_paths(args: argparse.Namespace) -> list[Path]:
    """Return the log files. Raises InputError if --out, whose files are replaced, is not apart from them."""
    out = args.out.resolve()
    for path in map(Path.resolve, args.logs):
        if path in (out, *out.parents) or out in path.parents:
            raise InputError(f"--out: must not be inside LOGS, nor LOGS inside of it, got {out} and {path}")
    return line_files(args.logs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for train, dev and test .jsonl.xz")


def run(args: argparse.Namespace) -> None:
    episodes, dropped = import_logs(read_paths(args), args.env, read_shares(args), args.seed)
    if SPLITS[0] not in episodes:
        raise InputError(f"--logs: no episode left to train on; dropped: {'; '.join(dropped) or 'none'}")
    for split in SPLITS:
        (args.out / f"{split}.jsonl.xz").unlink(missing_ok=True)
    for split in reversed(SPLITS):  # train last: a folder without it is unfinished, and never of two imports
        plays = episodes.get(split, [])
        steps = sum(len(episode.steps) - 1 for episode in plays)
        if plays:
            write_episodes(args.out / f"{split}.jsonl.xz", plays)
        print(f"{split}: {len(plays)} episodes, {steps} steps, {len(set(map(group_of, plays)))} goals or seeds")
    for reason, count in dropped.most_common():
        print(f"dropped: {count}, {reason}")
