"""The list of names and how it is built."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from data_prep.environments.scienceworld.names import ENTITIES, name_list
from lab.data.build_entities import KINDS, episode_names, jar_names, without_state
from loopwm.records.errors import InputError


def test_names_in_episodes_are_the_words_after_an_article(tmp_path: Path) -> None:
    look = (
        "This room is called the art studio. In it, you see:\n\ta substance called liquid gallium\n\ta table. On the "
        "table is: a red light bulb, which is off.\n\ta dead pea plant in the adult stage with a tall height\n"
        "\tan inclined plane with a rubber surface\n\ta thermometer, currently reading a temperature of 10 degrees"
    )
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"steps": [{"look": look, "inventory": None}]}) + "\n")
    expected = {"art studio", "gallium", "table", "red light bulb", "pea plant", "inclined plane", "rubber"}
    assert set(episode_names([path])) == expected | {"thermometer"}


def test_states_are_no_part_of_a_name() -> None:
    assert without_state("dead juvenile giant tortoise") == "giant tortoise"
    assert without_state("adult") == ""


def test_the_committed_list_holds_what_the_simulators_classes_are_called() -> None:
    package = importlib.util.find_spec("scienceworld")
    if package is None or package.origin is None:
        pytest.skip("the scienceworld package is not installed")
    names = set(jar_names(Path(package.origin).with_name("scienceworld.jar")))
    committed = set(ENTITIES.read_text().splitlines())
    assert {"glass cup", "ultra low temperature freezer", "lemon tree", "dove egg"} <= names
    assert names - KINDS <= committed


def test_committed_names_cover_rooms_substances_and_lettered_things() -> None:
    text = "Take unknown substance R from flower pot 7 in the living room to the foundry with a plastic fork."
    expected = {"unknown substance r", "flower pot 7", "living room", "foundry", "plastic fork"}
    assert name_list().longest(text) == expected


def test_a_file_that_is_no_jar_is_refused_by_name(tmp_path: Path) -> None:
    jar = tmp_path / "x.jar"
    jar.write_text("no zip")
    with pytest.raises(InputError, match=r"x\.jar: must be a readable jar"):
        list(jar_names(jar))
