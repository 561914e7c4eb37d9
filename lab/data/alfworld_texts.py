"""Render texts of ALFWorld games from their own grammar, without the simulator.

A game folder holds `game.tw-pddl`: JSON with `pddl_problem` (objects and their places) and `grammar` (commands and
sentences, with gaps like `{r.name}`); and `traj_data.json`, where people describe the task. The texts are for a
vocabulary only, so sentences about the start of a game suffice.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwm.records.errors import InputError

TRAIN_FOLDERS = ("train", "valid_train")
"""Folders of games that training may use."""

GAME, NOTE = "game", "note"
"""Kinds of text: shown by a game, and written by people about its task."""

_FILE = re.compile(rf"(?:^|/)(?:{'|'.join(TRAIN_FOLDERS)})/.*/(game\.tw-pddl|traj_data\.json)$")
_FACT = re.compile(r"\((receptacleType|objectType|inReceptacle|openable) ([^?\s]+?)(?: ([^?\s]+?))?\)")
_RULE = re.compile(r'"([\w.-]+(?:\(\w\))?)"\s*:\s*\[(.*?)\n\s*\]', re.DOTALL)
_COMMAND = re.compile(r'template\s*::\s*"([^"\[]+)"')
_SENTENCE = re.compile(r'"rhs"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ABOUT_OBJECTS = (
    "PickupObject.feedback", "PutObject.feedback", "toggleObject.feedback", "heatObject.feedback",
    "cleanObject.feedback", "coolObject.feedback", "examineObject.feedback",
)  # fmt: skip


@dataclass(frozen=True)
class GameTexts:
    """Texts of a game: sentences and commands, names such as "drawer 4", and places of things."""

    contents: dict[str, tuple[str, ...]]
    openable: frozenset[str]
    sentences: dict[str, list[str]]
    commands: tuple[str, ...]


def train_texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (`GAME` or `NOTE`, text) of the games in the train folders of a folder or tar archive.

    Raises InputError if there is none.
    """
    any_game = False
    for name, text in _train_files(path):
        try:
            record = json.loads(text)
            if name.endswith("game.tw-pddl"):
                any_game = True
                yield from ((GAME, text) for text in game_texts(parse_game(record)))
            else:
                yield from ((NOTE, note["task_desc"]) for note in record["turk_annotations"]["anns"])
        except (json.JSONDecodeError, KeyError, IndexError) as error:
            raise InputError(f"{name}: must be a game ({error!r})") from error
    if not any_game:
        raise InputError(f"{path}: no game.tw-pddl under {' or '.join(TRAIN_FOLDERS)}")


def _train_files(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if _FILE.search(file.as_posix()):
                yield str(file), file.read_text(encoding="utf-8")
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if (content := archive.extractfile(member)) and _FILE.search(member.name):
                    yield member.name, content.read().decode()
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"{path}: must be a folder or tar archive of games ({error})") from error


def parse_game(record: Mapping[str, Any]) -> GameTexts:
    """Parse the JSON of a `game.tw-pddl`. Raises KeyError for a missing field."""
    facts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for kind, first, second in _FACT.findall(record["pddl_problem"]):
        facts[kind].append((first, second))
    names = _names(facts["receptacleType"] + facts["objectType"])
    contents: dict[str, list[str]] = {names[place]: [] for place, _ in facts["receptacleType"]}
    for thing, place in facts["inReceptacle"]:
        contents[names[place]].append(names[thing])
    grammar = record["grammar"]
    return GameTexts(
        contents={place: tuple(things) for place, things in contents.items()},
        openable=frozenset(names[thing] for thing, _ in facts["openable"]),
        sentences={
            rule: [json.loads(f'"{s}"') for s in _SENTENCE.findall(body)] for rule, body in _RULE.findall(grammar)
        },
        commands=tuple(_COMMAND.findall(grammar)),
    )


def _names(typed: list[tuple[str, str]]) -> dict[str, str]:
    """Return numbers of the things of a kind as the game does, `drawer 1` first."""
    counts: Counter[str] = Counter()
    names = {}
    for thing, kind in typed:
        word = kind.removesuffix("Type").lower()
        counts[word] += 1
        names[thing] = f"{word} {counts[word]}"
    return names


def game_texts(game: GameTexts) -> Iterator[str]:
    """Yield goal, first observation, commands and observations of a game."""
    yield from game.sentences["task"]
    room = "You are in the middle of a room. Looking quickly around you, you see"
    yield f"{room} {_listing(tuple(game.contents))}."
    for place, things in game.contents.items():
        yield from _receptacle_texts(game, place, things)
        yield f"go to {place}"
    for place, things in game.contents.items():
        for thing in things:
            for command in game.commands:
                yield _fill(command, thing, place)
            for rule in _ABOUT_OBJECTS:
                for sentence in game.sentences[rule]:
                    yield _fill(sentence, thing, place)


def _receptacle_texts(game: GameTexts, place: str, things: tuple[str, ...]) -> Iterator[str]:
    inside, closed, on = game.sentences["examineReceptacle.feedback"]
    arrive = game.sentences["GotoLocation.feedback"][0]
    if place not in game.openable:
        yield _fill(arrive, "", place, _fill(_with_listing(on, things), "", place))
        return
    yield _fill(arrive, "", place, _fill(closed, "", place))
    yield _fill(game.sentences["OpenObject.feedback"][0], "", place, _fill(_with_listing(inside, things), "", place))
    yield _fill(game.sentences["CloseObject.feedback"][0], "", place)


def _with_listing(sentence: str, things: tuple[str, ...]) -> str:
    return re.sub(r"\[.*?\]", _listing(things), sentence)


def _listing(things: tuple[str, ...]) -> str:
    words = [f"a {thing}" for thing in things]
    if not words:
        return "nothing"
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f", and {words[-1]}"


def _fill(sentence: str, thing: str, place: str, examined: str = "") -> str:
    sentence = sentence.replace("#examineReceptacle.feedback#", examined)
    sentence = _with_listing(sentence, (thing,))
    return re.sub(r"\{(\w+)(?:\.name)?\}", lambda gap: _named(gap[1], thing, place), sentence)


def _named(gap: str, thing: str, place: str) -> str:
    """Fill a gap of the grammar: `r` is a receptacle; `o`, `co`, `ko`, `outero`, ... are objects."""
    return place if gap == "r" else thing
