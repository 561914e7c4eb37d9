"""Choice study: does a world predict the rewarded turn at the end of a corridor? MiniGrid's Memory mazes.

Held-out episodes of the policy `choose` see the cue, walk to the corridor's end and turn to one of two objects. The
world gets the frames up to the step before that turn and imagines the turn and the step after it several times; the
share of rewarded futures is compared with the real reward. Without memory of the cue the area is 0.5.

Shape suffixes: B episodes, T steps, N futures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from eval.scores.tables import table
from lab.pixels.filmstrip import world_of
from lab.pixels.mazes import FORWARD, LEFT, RIGHT
from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.imagined import FrameWorld
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, write_json
from loopwm.records.frames import FrameEpisode, episode_files, read_episode
from loopwm.records.provenance import provenance

OUT_OF_SIGHT = 4
"""Frames before the turn that must not show the cue, so that a memory of that length cannot contain it."""
ROWS = 20
"""Episodes per batch."""
RESAMPLED = 1000


@dataclass(frozen=True)
class Choice:
    """Result of a model.

    area: area under the ROC curve with 95 % bounds over episodes
    paid: share of rewarded episodes
    """

    episodes: int
    area: float
    low: float
    high: float
    paid: float


def is_valid(episode: FrameEpisode) -> bool:
    """Return True if an episode ends after a turn at the corridor's end and the cue was visible but left sight."""
    if len(episode) <= OUT_OF_SIGHT + 2 or not episode.terminated[-1]:
        return False
    turn, step = episode.action[-2:].tolist()
    visible = episode.extras["cue"][:-2, 0] >= 0
    return turn in (LEFT, RIGHT) and step == FORWARD and bool(visible.any() and not visible[-OUT_OF_SIGHT:].any())


def choices(folder: Path, count: int) -> list[FrameEpisode]:
    """Find the first `count` valid episodes of a folder.

    Raises:
        InputError: there are too few, or episodes have no cue
    """
    episodes: list[FrameEpisode] = []
    for path in episode_files(folder):
        episode = read_episode(path)
        if "cue" not in episode.extras:
            raise InputError(f"{path}: has no cue to remember")
        if is_valid(episode):
            episodes.append(episode)
        if len(episodes) == count:
            return episodes
    raise InputError(
        f"{folder}: {len(episodes)} episodes end in a choice out of the cue's sight, {count} are asked for"
    )


def promised(world: FrameWorld[Any], episodes: Sequence[FrameEpisode], futures: int, seed: int) -> NDArray[np.float64]:
    """Return the share of futures (B,) in which the last two actions of each episode are rewarded."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(episode) - 1 for episode in episodes]
    longest = max(lengths)
    obs = np.stack([_before(e.obs[:n], longest) for e, n in zip(episodes, lengths, strict=True)])
    action = np.stack([_before(e.action[: n - 1], longest - 1) for e, n in zip(episodes, lengths, strict=True)])
    first = np.zeros(obs.shape[:2], bool)
    first[:, 0] = True
    first[np.arange(len(lengths)), longest - np.array(lengths)] = True
    seen_frames, acted, begins = (torch.from_numpy(x).repeat_interleave(futures, 0) for x in (obs, action, first))
    state = world.start(seen_frames, acted, begins, generator)
    for place in (-2, -1):
        acted = torch.tensor([int(e.action[place]) for e in episodes]).repeat_interleave(futures)
        imagined = world.step(state, acted, generator)
        state = imagined.state
    return (imagined.reward > 0).double().view(len(episodes), futures).mean(1).numpy()


def _before(steps: NDArray[Any], length: int) -> NDArray[Any]:
    """Left-pad steps with copies of the first, as steps of an episode before."""
    return np.concatenate((np.repeat(steps[:1], length - len(steps), 0), steps))


def area(score: NDArray[np.float64], paid: NDArray[np.bool_]) -> float:
    """Return the ROC area: how often rewarded episodes score above unrewarded ones, ties half; NaN without both."""
    above = score[paid][:, None] - score[~paid]
    return float(((above > 0) + 0.5 * (above == 0)).mean()) if above.size else float("nan")


def measured(score: NDArray[np.float64], paid: NDArray[np.bool_]) -> Choice:
    rng = np.random.default_rng(0)
    resamples = (rng.integers(len(paid), size=len(paid)) for _ in range(RESAMPLED))
    low, high = np.nanpercentile([area(score[rows], paid[rows]) for rows in resamples], [2.5, 97.5]).tolist()
    return Choice(len(paid), area(score, paid), low, high, float(paid.mean()))


def run_study(
    models: dict[str, Path],
    frames: Path,
    count: int,
    futures: int,
    seed: int,
    sampling: Mapping[str, Any],
    out: Path,
) -> None:
    """Write results.json and report.md to the folder `out`. sampling: see `world_of`."""
    episodes, results = choices(frames, count), {}
    paid = np.array([episode.reward[-1] > 0 for episode in episodes])
    if len(set(paid.tolist())) < 2:
        raise InputError(f"{frames}: all choices were rewarded, or none")
    for label, folder in models.items():
        system = load_checkpoint(folder)
        episodes[0].space.require(system.space, str(folder))
        parts = tqdm(range(0, count, ROWS), unit="batch", desc=label)
        world = world_of(system, sampling)
        scores = [promised(world, episodes[start : start + ROWS], futures, seed + start) for start in parts]
        results[label] = measured(np.concatenate(scores), paid)
    record = {
        "study": "choice at the corridor's end",
        "frames": str(frames),
        "futures": futures,
        "models": {label: str(folder) for label, folder in models.items()},
        "sampling": dict(sampling),
        "results": {label: vars(result) for label, result in results.items()},
        "provenance": provenance("lab"),
    }
    write_json(out / "results.json", record)
    write_atomic(out / "report.md", render(results, futures))


def render(results: dict[str, Choice], futures: int) -> str:
    head = (
        "# Study: the choice at the corridor's end\n\n"
        f"The turn and the step after it imagined {futures} times; area under the curve of the real reward by the "
        "share of futures that bring one (95 % over episodes).\n\n"
    )
    lines = [
        [label, str(r.episodes), f"{r.area:.3f} ({r.low:.3f} to {r.high:.3f})", f"{100 * r.paid:.1f}"]
        for label, r in results.items()
    ]
    return head + table(["Model", "episodes", "area", "rewarded, %"], lines) + "\n"
