"""Train episodes that baselines learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from loopwm.records.episodes import TRAIN_SPLITS, read_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import line_files
from loopwm.records.training_episodes import episode_hash


@dataclass(frozen=True)
class TrainEpisode:
    """Train episode.

    steps: (action, observation) pairs, stripped; the first action is empty. hash: its name in checkpoints.
    """

    env: str
    policy: str
    goal: str
    steps: tuple[tuple[str, str], ...]
    hash: int = field(repr=False)

    @property
    def hashed(self) -> bytes:
        """Return its contribution to the SHA-256 of episodes (`episodes_sha256`), independent of files."""
        return f"{self!r}\n".encode()


def verb(action: str) -> str:
    return action.split()[0]


def read_train_episodes(paths: Iterable[Path]) -> Iterator[TrainEpisode]:
    """Yield the episodes of files and folders. Raises InputError for one outside the train split."""
    for path in line_files(paths):
        episodes = tqdm(read_episodes(path), desc=path.name, unit="episode", leave=False)
        for line, episode in enumerate(episodes, start=1):
            if episode.split not in TRAIN_SPLITS:
                raise InputError(f"{path}: line {line}: split: must be train, got {episode.split!r}")
            steps = [((step.action or "").strip(), step.observation.strip()) for step in episode.steps]
            if not all(action for action, _ in steps[1:]):
                raise InputError(f"{path}: line {line}: action: must not be empty")
            number = int(episode_hash(episode), 16)
            yield TrainEpisode(episode.env, episode.policy, episode.goal, tuple(steps), number)
