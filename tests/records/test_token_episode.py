"""Tokenised episodes read the texts that they were made of."""

from __future__ import annotations

import numpy as np
import pytest

from loopwm.records.token_episode import ACTION, FACT_DTYPE, HIDDEN, LOOK, OBSERVATION, PlacedFacts, TokenEpisode
from tests.fixtures.rows import episode_of_texts, texts_of

WORDS = [[7, 8], [], [9], [7, 8], [], [5, 6, 7]]
LOOKS = [[1], None, [9], None, [1], []]


@pytest.fixture
def episode() -> TokenEpisode:
    return episode_of_texts([3, 4], WORDS, [[], *WORDS[1:]], LOOKS, LOOKS, dones=[False] * 5 + [True], env="toy")


def test_token_episode_texts_are_those_it_was_made_of(episode: TokenEpisode) -> None:
    assert episode.goal.tolist() == [3, 4]
    assert [text.tolist() for text in episode.observations] == WORDS
    assert [text.tolist() for text in episode.actions] == [[], *WORDS[1:]]
    assert [None if text is None else text.tolist() for text in texts_of(episode, LOOK)] == LOOKS
    assert texts_of(episode, HIDDEN) == [None] * 6
    assert [text.tolist() for text in episode.observations[2:4]] == WORDS[2:4]
    assert episode.observations[-1].tolist() == WORDS[-1]
    assert (episode.last_step, episode.dones.tolist(), episode.env) == (5, [False] * 5 + [True], "toy")
    assert np.isnan(episode.rewards).all()
    with pytest.raises(IndexError):
        episode.observations[6]


def test_token_episode_heads_hold_what_the_context_shows(episode: TokenEpisode) -> None:
    assert list(episode.head(0, "observed")) == ["goal"]
    assert [None if text is None else text.tolist() for text in episode.head(0, "full").values()] == [
        [3, 4],
        None,
        [1],
        [1],
    ]
    assert episode.head(1, "snapshot")["look"] is None


@pytest.mark.parametrize(("kind", "texts"), [(OBSERVATION, WORDS), (LOOK, LOOKS), (ACTION, [None, *WORDS[1:]])])
def test_token_episode_columns_agree_with_its_texts(
    episode: TokenEpisode, kind: int, texts: list[list[int] | None]
) -> None:
    assert episode.lengths(kind).tolist() == [len(text or ()) for text in texts]
    found = episode.identities(kind)
    for i, one in enumerate(texts):
        for j, other in enumerate(texts):
            assert (found[i] == found[j]) == ((one or []) == (other or []))
    assert episode.lengths(HIDDEN).tolist() == [0] * 6


def test_token_episode_facts_are_those_of_the_text(episode: TokenEpisode) -> None:
    start = episode.spans["start"][episode.spans["kind"] == OBSERVATION][5]
    rows = [(start - 1, 1, 3), (start, 0, 4), (start + 1, 2, 5), (start + 3, 0, 6)]
    episode = TokenEpisode(episode.tokens, episode.spans, episode.steps, np.array(rows, dtype=FACT_DTYPE))
    assert episode.facts_of(OBSERVATION, 5) == PlacedFacts((4,), (((1, 2), [5]),))
    assert episode.facts_of(OBSERVATION, 1) == episode.facts_of(LOOK, 1) == PlacedFacts()
