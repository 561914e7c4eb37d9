"""Table of the `markov` baseline: the observation most often seen after an action string in train episodes.

Episodes of experts (policies `gold` and `expert`) come first; those of other policies only fill in the actions and
verbs that no expert used. Counted together, the refusals that noisy policies provoke win too often: on held-out gold
episodes that costs 10 points of token F1.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.models.train_episodes import EXPERTS, read_train_episodes
from eval.scores.entities import DATA
from loopwm.records.errors import InputError
from loopwm.records.files import sha256

_Key = tuple[str, str]
_Counts = dict[_Key, Counter[str]]


@dataclass(frozen=True)
class MarkovTable:
    """Most frequent observation by action, by verb (an action's first word), and over all steps."""

    env: str
    transitions: int
    actions: dict[str, str]
    verbs: dict[str, str]
    fallback: str

    def predict(self, action: str) -> str:
        """Look up the action; back off to its verb, then to all steps."""
        known = self.actions.get(action.strip())
        return known if known is not None else self.verbs.get(verb(action), self.fallback)

    @cached_property
    def sha256(self) -> str:
        return sha256(to_json(self))


def verb(action: str) -> str:
    return action.split()[0]


def table_path(env: str) -> Path:
    return DATA / f"markov-{env}.json.gz"


def build_tables(paths: Iterable[Path]) -> dict[str, MarkovTable]:
    """Build one table an environment. Raises InputError for episodes outside the train split."""
    expert: dict[str, _Counts] = defaultdict(lambda: defaultdict(Counter))
    other: dict[str, _Counts] = defaultdict(lambda: defaultdict(Counter))
    for episode in read_train_episodes(paths):
        counts = (expert if episode.policy in EXPERTS else other)[episode.env]
        for action, observation in episode.steps[1:]:
            for key in _keys(action):
                counts[key][observation] += 1
    return {env: _table(env, expert[env], other[env]) for env in sorted({*expert, *other})}


def _keys(action: str) -> tuple[_Key, ...]:
    return ("action", action), ("verb", verb(action)), ("any", "")


def _table(env: str, expert: _Counts, other: _Counts) -> MarkovTable:
    # Ties go to the text that sorts first, so the result does not depend on the order of files.
    best = {
        key: min(counts.items(), key=lambda item: (-item[1], item[0]))[0] for key, counts in {**other, **expert}.items()
    }
    return MarkovTable(
        env=env,
        transitions=sum(counts["any", ""].total() for counts in (expert, other)),
        actions={name: text for (kind, name), text in best.items() if kind == "action"},
        verbs={name: text for (kind, name), text in best.items() if kind == "verb"},
        fallback=best["any", ""],
    )


def to_json(table: MarkovTable) -> str:
    """Return the content of a table file, as bytes are hashed."""
    return json.dumps(asdict(table), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def load_table(path: Path) -> MarkovTable:
    """Read a table. Raises InputError naming the file."""
    try:
        record: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        return MarkovTable(**record)
    except (OSError, EOFError, zlib.error, ValueError, TypeError) as error:
        raise InputError(f"{path}: must be a markov table ({error})") from error
