from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loopwm.records.episodes import Episode, Step
from loopwm.records.errors import InputError
from loopwm.records.training_episodes import FILE, TrainingEpisodes, digest, episode_hash

STEPS = (Step(None, "a room", 0, False, "look", "nothing"), Step("open door", "It is open.", 1, True))
EPISODE = Episode("scienceworld", "boil", 3, "train", "gold", "boil water", STEPS)


def record(**hashes: list[int]) -> TrainingEpisodes:
    return TrainingEpisodes({f"episodes/{env}": np.array(some, dtype=np.uint64) for env, some in hashes.items()})


@pytest.mark.parametrize(
    "other",
    [
        replace(EPISODE, env="alfworld"),
        replace(EPISODE, task="melt"),
        replace(EPISODE, variation=4),
        replace(EPISODE, variation="3"),
        replace(EPISODE, steps=STEPS[:1]),
        replace(EPISODE, steps=(STEPS[0], replace(STEPS[1], action="close door"))),
        replace(EPISODE, steps=(STEPS[0], replace(STEPS[1], observation="It is shut."))),
    ],
)
def test_episode_hash_changes_with_what_was_played(other: Episode) -> None:
    assert episode_hash(other) != episode_hash(EPISODE)


def test_episode_hash_ignores_views_scores_and_policy() -> None:
    """Looks and hidden states are sampled again when the simulators' hidden state is refreshed."""
    steps = (replace(STEPS[0], look=None, hidden_state="all"), replace(STEPS[1], score=9, done=False))
    other = replace(EPISODE, steps=steps, policy="noisy-expert", hidden_state="all", split="built")
    assert episode_hash(other) == episode_hash(EPISODE)
    assert len(episode_hash(EPISODE)) == 16


def test_records_joined_hold_both_and_unknown_stays_unknown() -> None:
    joined = record(scienceworld=[1, 2**64 - 1]).joined(record(scienceworld=[1, 3], alfworld=[7]))
    assert joined is not None
    assert joined.episodes("scienceworld") == {1, 3, 2**64 - 1}
    assert joined.episodes("alfworld") == {7}
    assert joined.episodes("maze") == set()
    assert record(alfworld=[1]).joined(None) is None


def test_records_are_read_as_they_were_written(tmp_path) -> None:
    assert TrainingEpisodes.load(tmp_path) is None
    written = record(scienceworld=[1, 2**64 - 1], alfworld=[7])
    written.save(tmp_path)
    loaded = TrainingEpisodes.load(tmp_path)
    for read in (loaded, TrainingEpisodes.from_state(written.state_dict())):
        assert read is not None
        assert {name: some.tolist() for name, some in read.hashes.items()} == {
            "episodes/scienceworld": [1, 2**64 - 1],
            "episodes/alfworld": [7],
        }
    assert TrainingEpisodes.from_state(None) is None
    assert digest([3, 1, 3]) == digest(iter([1, 3])) != digest([1])


def test_damaged_record_is_refused_in_one_line(tmp_path) -> None:
    record(alfworld=list(range(99))).save(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    for content in (b"", b"nothing", whole[:300]):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(InputError, match=r"training_episodes.npz: not a file of training episodes") as error:
            TrainingEpisodes.load(tmp_path)
        assert "\n" not in str(error.value)
