from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loopwm.records.episodes import Episode
from loopwm.records.errors import InputError
from loopwm.records.shards import check_shards
from loopwm.text.model.tokenizer import tokenizer_hash
from tests.fixtures.shards import toy_episode, write_toy_shards


def test_shards_of_an_interrupted_rewrite_are_refused(tmp_path: Path) -> None:
    write_toy_shards(tmp_path, map(toy_episode, range(8)))
    assert check_shards(tmp_path, tokenizer_hash())["episodes"] == 8

    def interrupted() -> Iterator[Episode]:
        yield from map(toy_episode, range(8, 40))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_toy_shards(tmp_path, interrupted())
    with pytest.raises(InputError, match=r"index\.json: missing \(not a folder of shards, or unfinished\)"):
        check_shards(tmp_path, tokenizer_hash())
