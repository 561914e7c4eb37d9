"""Tokenize episodes for `loopwm.records.shards`, which documents the layout."""

from __future__ import annotations

import json
import os
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

import loopwm
from data_prep.environments import declared
from data_prep.environments.base import Need, TextFacts
from data_prep.import_logs import POLICY
from loopwm.records import template as text_format
from loopwm.records.episodes import Episode, format_episode, parse_episode, read_episodes
from loopwm.records.errors import InputError, loading
from loopwm.records.files import writing
from loopwm.records.refusals import is_refused
from loopwm.records.shards import META_FIELDS, PARTS, EpisodeArrays
from loopwm.records.token_episode import (
    ACTION,
    ANSWER,
    FACT_DTYPE,
    GOAL,
    HIDDEN,
    INVENTORY,
    LOOK,
    OBSERVATION,
    QUERY,
    SPAN_DTYPE,
    STEP_DTYPE,
)
from loopwm.records.training_episodes import episode_hash

LINE_BREAK = re.compile(r"(?<=\S)(\n\t?)(?=\S)")
"""Line breaks to cut texts at: blanks beside a break belong to one token with it."""

MAX_LINES, MAX_TEXTS = 200_000, 10_000
"""Lines, or whole texts, cached by a `LineEncoder`, some 50 MB."""

TOKENIZER_FILE = Path(loopwm.__file__).parent / "text" / "model" / "tokenizer.json"


def episode_texts(episode: Episode) -> Iterator[tuple[int, int, str]]:
    """Yield (kind, step, text) of every text of an episode that is not null, in the order of the spans."""
    yield GOAL, 0, episode.goal
    for i, step in enumerate(episode.steps):
        hidden = episode.hidden_state_at(i)
        texts = (hidden, step.look, step.inventory, step.observation, step.action)
        kinds = (HIDDEN, LOOK, INVENTORY, OBSERVATION, ACTION)
        yield from ((kind, i, text) for kind, text in zip(kinds, texts, strict=True) if text is not None)
        if step.look is not None and step.inventory is not None:
            for action, answer in declared(episode.env).state_queries(step.look, step.inventory):
                yield from ((QUERY, i, action), (ANSWER, i, answer))


class LineEncoder:
    """Encodes texts line by line and caches the lines' tokens: an episode's looks share nearly all of their lines.

    The tokens are those of the whole text, since the pre-tokenizer isolates line breaks. Texts stay whole, which is
    slower, if it joins line breaks with other text, as those of adopted decoders do.

    dtype: of token ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n\tb\n c")]
        isolated = {(1, 2), (2, 4), (5, 6)} <= set(spans)
        self._split = LINE_BREAK.split if isolated else lambda text: [text]
        self._most = MAX_LINES if isolated else MAX_TEXTS
        self.dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
        self._tokenizer = tokenizer
        self._lines: dict[str, tuple[list[int], list[int]]] = {}
        """Token ids of each line, and the number of its characters up to the end of each token."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        lines = [self._split(text) for text in texts]
        self._add({line for parts in lines for line in parts})
        return [[token for line in parts for token in self._lines[line][0]] for parts in lines]

    def token_ends(self, text: str) -> list[int]:
        """Return the number of characters of a text up to the end of each of its tokens."""
        lines, before, ends = self._split(text), 0, []
        self._add(set(lines))
        for line in lines:
            ends += [before + end for end in self._lines[line][1]]
            before += len(line)
        return ends

    def _add(self, lines: set[str]) -> None:
        if len(self._lines) > self._most:
            self._lines.clear()
        # Not `lines - self._lines.keys()`, which goes through all keys.
        missing = sorted(line for line in lines if line not in self._lines)
        for line, encoding in zip(
            missing, self._tokenizer.encode_batch(missing, add_special_tokens=False), strict=True
        ):
            self._lines[line] = encoding.ids, [end for _, end in encoding.offsets]


def encode_episode(encoder: LineEncoder, episode: Episode, original: Episode | None = None) -> EpisodeArrays:
    """Return tokens and spans of an episode; a repeated text is stored once. original: before a rewrite."""
    texts = [(kind, step, text_format.clean(text)) for kind, step, text in episode_texts(episode)]
    distinct = list(dict.fromkeys(text for _, _, text in texts))
    encoded = encoder.encode(distinct)
    starts = np.cumsum([0] + [len(ids) for ids in encoded])
    place = {text: (int(starts[i]), len(encoded[i])) for i, text in enumerate(distinct)}
    factual = list(dict.fromkeys(text for kind, _, text in texts if kind not in (GOAL, HIDDEN)))
    scores = [step.score for step in episode.steps]
    rewards = np.diff(scores, prepend=scores[0])  # the first step brings none
    accepted = (not is_refused(step.observation) for step in episode.steps)
    outcomes = list(zip(rewards, (step.done for step in episode.steps), accepted, strict=True))
    return EpisodeArrays(
        tokens=np.array([token for ids in encoded for token in ids], dtype=encoder.dtype),
        spans=np.array([(*place[text], step, kind) for kind, step, text in texts], dtype=SPAN_DTYPE),
        steps=np.array(outcomes, dtype=STEP_DTYPE),
        facts=_facts(encoder, declared(episode.env).facts(factual), factual, [place[text][0] for text in factual]),
        meta={name: getattr(episode, name) for name in META_FIELDS} | {"hash": episode_hash(original or episode)},
    )


def _facts(
    encoder: LineEncoder, facts: Sequence[TextFacts], texts: Sequence[str], starts: Sequence[int]
) -> NDArray[np.void]:
    """Return the rows of facts of an episode's texts, whose tokens begin at `starts`."""
    numbers: dict[str, int] = {}
    rows = []
    for text, text_facts, start in zip(texts, facts, starts, strict=True):
        rows += [(start, 0, numbers.setdefault(fact, len(numbers))) for fact in sorted(text_facts.shows)]
        ends = encoder.token_ends(text) if text_facts.needs else []
        for need in text_facts.needs:
            first, end = _covered(ends, need)
            known_by = (numbers.setdefault(fact, len(numbers)) for fact in sorted(need.facts))
            rows += [(start + first, end - first, number) for number in known_by]
    return np.array(sorted(rows), dtype=FACT_DTYPE)


def _covered(ends: Sequence[int], need: Need) -> tuple[int, int]:
    """Return the first token and the end of those that have a character of the need.

    A token may hold the end of a template and the beginning of a list; it then reveals part of that list.
    """
    end = bisect_right(ends, need.end)
    reaches = end > 0 and ends[end - 1] == need.end
    return bisect_right(ends, need.start), end if reaches else end + 1


@lru_cache(maxsize=1)
def _load(path: str) -> LineEncoder:
    with loading(Path(path)):
        return LineEncoder(Tokenizer.from_file(path))


Rewrite = Callable[[Episode, str], tuple[Episode, str]]
"""Change of an episode before it is encoded. Takes the episode and its line; returns it and an outcome to count."""


def keep(episode: Episode, line: str) -> tuple[Episode, str]:
    return episode, "unchanged"


def _encode_line(record: dict[str, Any], tokenizer_file: str, rewrite: Rewrite) -> dict[str, Any]:
    """Encode a record for the `datasets` map: arrays travel as bytes, exact and without a schema."""
    original = parse_episode(record["episode"])
    episode, outcome = rewrite(original, record["episode"])
    encoded = encode_episode(_load(tokenizer_file), episode, original)
    arrays = {part: getattr(encoded, part).tobytes() for part in PARTS}
    return {"meta": json.dumps(encoded.meta), "outcome": outcome, **arrays}


def consistent_episodes(files: list[Path], skipped: list[str] | None) -> Iterator[Episode]:
    """Yield the episodes of the files without those whose start contradicts an earlier one of their variation.

    skipped: receives a line for each of these; None: raise InputError instead.
    """
    starts: dict[tuple[str, str, int | str], tuple[str, str]] = {}
    for path in files:
        for number, episode in enumerate(read_episodes(path), start=1):
            start = episode.goal, episode.steps[0].observation
            first = starts.setdefault((episode.env, episode.task, episode.variation), start)
            if start == first or episode.policy == POLICY:  # a log names no game
                yield episode
                continue
            field = "goal" if start[0] != first[0] else "steps[0].observation"
            game = f"{episode.task}, variation {episode.variation}"
            problem = f"{path}: line {number}: {field}: {game}, began otherwise in an earlier episode"
            if skipped is None:
                raise InputError(problem)
            skipped.append(problem)


def tokenize_files(
    files: list[Path],
    tokenizer_file: Path,
    workers: int,
    rewrite: Rewrite,
    outcomes: Counter[str],
    skipped: list[str] | None,
) -> Iterator[EpisodeArrays]:
    """Encode all episodes of the files, in order, on `workers` processes; count what `rewrite` returns in `outcomes`.

    skipped: as in `consistent_episodes`.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are processes, one thread each
    from datasets import Dataset  # imported late: slow, and only this command needs it
    from datasets.arrow_writer import SchemaInferenceError
    from datasets.exceptions import DatasetGenerationError

    def lines() -> Iterator[dict[str, str]]:
        for episode in consistent_episodes(files, skipped):
            yield {"episode": format_episode(episode)}

    with tempfile.TemporaryDirectory() as cache, writing(Path(cache)):
        try:
            dataset = Dataset.from_generator(lines, cache_dir=cache)
        except DatasetGenerationError as error:
            if isinstance(error.__cause__, SchemaInferenceError):
                raise InputError("--episodes: must contain an episode, got none") from None
            raise error.__cause__ if isinstance(error.__cause__, InputError | OSError) else error from None
        encoded = dataset.map(
            _encode_line,
            fn_kwargs={"tokenizer_file": str(tokenizer_file), "rewrite": rewrite},
            remove_columns=["episode"],
            num_proc=workers if workers > 1 else None,
            desc="tokenize",
        )
        for row in encoded:
            outcomes[row["outcome"]] += 1
            yield EpisodeArrays(
                tokens=np.frombuffer(row["tokens"], _load(str(tokenizer_file)).dtype),
                spans=np.frombuffer(row["spans"], SPAN_DTYPE),
                steps=np.frombuffer(row["steps"], STEP_DTYPE),
                facts=np.frombuffer(row["facts"], FACT_DTYPE),
                meta=json.loads(row["meta"]),
            )
