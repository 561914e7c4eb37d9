"""Renamings of recorded episodes, and of made-up ones in which every name is known."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from data_prep.__main__ import main as tokenize
from data_prep.environments.alfworld.hidden import listed
from lab.data.renaming import (
    Kind,
    Renaming,
    RenamingError,
    draw_in_order,
    draw_numbered,
    keeps_order,
    load_kinds,
    rename_episode,
    sort_alfworld,
)
from lab.data.tokenize_renamed import NOT_DRAWN, RENAMED, RenamingPlan, describe_renamings
from lab.main import main
from loopwm.records.episodes import Episode, Step, read_episodes, write_episodes
from loopwm.records.shards import check_shards
from loopwm.text.model.tokenizer import tokenizer_hash
from tests.fixtures.episodes import make_episode

SCIENCEWORLD = load_kinds("scienceworld")
SUITES = Path(__file__).parents[3] / "eval/suites"


def episodes_of(suite: str, count: int) -> list[Episode]:
    """Windows of a committed suite as episodes."""
    with gzip.open(SUITES / f"{suite}.jsonl.gz", "rt") as file:
        windows = [json.loads(line) for line in file][:: 500 // count]
    episodes = []
    for w in windows:
        steps = [Step(s["action"], s["observation"], 0, False) for s in w["history"]]
        steps[0] = replace(steps[0], look=w["look"], inventory=w["inventory"])
        episodes.append(Episode(w["env"], w["task"], w["variation"], w["split"], "gold", w["goal"], tuple(steps)))
    return episodes


def texts_of(episode: Episode) -> list[str]:
    steps = ((s.action, s.observation, s.look, s.inventory, s.hidden_state) for s in episode.steps)
    return [t for t in (episode.goal, episode.hidden_state, *(t for s in steps for t in s)) if t is not None]


def words(text: str) -> list[str]:
    return sorted(re.findall(r"\w+", text))


def room(*things: str, task: str = "find-animal", action: str = "take it") -> Episode:
    """A ScienceWorld episode whose first look lists these things, a line each."""
    look = "This room is called the kitchen. In it, you see: \n" + "".join(f"\t{thing}\n" for thing in things)
    return Episode("scienceworld", task, 3, "train", "gold", "goal", (
        Step(None, look, 0, False, look, "nothing"), Step(action, "You move it.", 0, False, look, "nothing"),
    ))  # fmt: skip


@pytest.mark.parametrize("suite", ["scienceworld-500-noisy", "alfworld-500-noisy"])
def test_the_inverse_restores_every_text_and_other_words_stay(suite: str) -> None:
    """Other words: in place in ScienceWorld; in ALFWorld, where lists are sorted again, as many of each."""
    changed = 0
    for i, episode in enumerate(episodes_of(suite, 25)):
        texts = texts_of(episode)
        draw = draw_numbered if episode.env == "alfworld" else draw_in_order
        renaming = draw(texts, load_kinds(episode.env), Random(i))
        back = renaming.inverse()
        assert sorted(renaming.names) == sorted(renaming.names.values())
        names = re.compile("|".join(rf"\b{name}\b" for name in sorted(renaming.names, key=len, reverse=True)) or "(?!)")
        for text in texts:
            new = renaming.apply(text)
            assert back.apply(new) == text
            before, after = (names.sub("*", t) for t in (text, new))
            assert (before == after) or (episode.env == "alfworld" and words(before) == words(after))
            changed += new != text
    assert changed > 50


def test_an_episode_is_renamed_alike_in_all_its_texts() -> None:
    kinds = [Kind(("{} box",), ("blue", "red")), Kind(("{}", "{} egg"), ("dove", "wolf"))]
    episode = replace(
        room("a bench", "a blue box", action="move Dove egg to blue box"),
        goal="Put the dove in the blue box. Dove eggs are blue.",
        hidden_state="a blue box and red boxes\na dove-egg\na wolf",
    )
    renamed = [rename_episode(episode, Random(i), kinds) for i in range(20)]
    both = next(r for r in renamed if "wolf in the red" in r.goal)
    assert both.goal == "Put the wolf in the red box. Wolf eggs are blue."
    assert both.steps[1].action == "move Wolf egg to red box"
    assert both.steps[1].look == (episode.steps[1].look or "").replace("blue box", "red box")
    assert both.hidden_state == "a red box and red boxes\na dove-egg\na dove"
    assert replace(both, goal="", steps=(), hidden_state="") == replace(episode, goal="", steps=(), hidden_state="")


def test_no_list_gets_out_of_order() -> None:
    """Between a desk and a painting, of six colours only green and orange may stand; so within a line."""
    colours = [Kind(("{} box",), ("blue", "green", "orange", "purple", "red", "yellow"))]
    lines = room("the agent", "a desk", "a green box", "a painting")
    inner = room("a counter. On the counter is: a banana, a green box, which is shut.")
    found: list[set[str]] = [set(), set()]
    for i in range(60):
        for colors, episode in zip(found, (lines, inner), strict=True):
            colors |= set(re.findall(r"(\w+) box", rename_episode(episode, Random(i), colours).steps[0].observation))
    assert found == [{"green", "orange"}, {"blue", "green", "orange", "purple", "red"}]
    assert keeps_order(["b", "a", "c"], ["a", "b", "c"])
    assert not keeps_order(["a", "b", "c"], ["a", "d", "c"])


def test_sorted_rooms_stay_sorted_and_articles_stay_right() -> None:
    def heads(look: str) -> list[str]:
        start = r"^\t(?:an?|the) (?:adult |baby |juvenile )?(?:substance called )?([\w -]+)"
        return [line.strip() for line in re.findall(start, look, re.MULTILINE)]

    articles: dict[str, set[str]] = defaultdict(set)
    names = {kind.forms[0]: "|".join(n for stem in kind.stems for n in kind.names(stem)) for kind in SCIENCEWORLD}
    after_article = {form: re.compile(rf"\b(an?) (?:{either})\b") for form, either in names.items()}
    rooms = 0
    for i, episode in enumerate(episodes_of("scienceworld-500-noisy", 25)):
        for before, after in zip(texts_of(episode), texts_of(rename_episode(episode, Random(i))), strict=True):
            if before != after and heads(before) == sorted(heads(before)):
                assert heads(after) == sorted(heads(after))
                rooms += 1
            for form, pattern in after_article.items():
                articles[form] |= set(pattern.findall(before))
    assert rooms > 20
    assert all(len(found) <= 1 for found in articles.values())
    assert sum(map(bool, articles.values())) >= 4


def test_alfworlds_lists_stay_in_order_and_receptacles_keep_their_names() -> None:
    places = re.compile(r"(?:cabinet|drawer|shelf|fridge|countertop|microwave|sinkbasin) \d+")
    for i, episode in enumerate(episodes_of("alfworld-500-noisy", 50)):
        for before, after in zip(texts_of(episode), texts_of(rename_episode(episode, Random(i))), strict=True):
            lists = [re.findall(r"[a-z]+ \d+", names) for names in re.findall(r"see ([^.]*, and [^.]*)\.", after)]
            assert all(names == sorted(names, key=listed) for names in lists)
            assert places.findall(before) == places.findall(after)
    hidden = (
        "On the desk 1, you see a mug 2, and a cup 1.\nThe mug 2 is hot.\nThe apple 9 is clean.\nThe lamp 1 is off."
    )
    assert sort_alfworld(hidden).splitlines() == [
        "On the desk 1, you see a cup 1, and a mug 2.",
        "The apple 9 is clean.",
        "The mug 2 is hot.",
        "The lamp 1 is off.",
    ]


def test_alfworlds_numbers_are_those_that_occur() -> None:
    kinds = [Kind(("{}",), ("cup", "mug"))]
    text = "You see a cup 1, a mug 3, a mug 2, and a mug 1."
    found = {draw_numbered([text], kinds, Random(i)).apply(text) for i in range(60)}
    assert found == {text, "You see a cup 3, a cup 2, a cup 1, and a mug 1."}
    pairs = {draw_numbered([text], kinds, Random(i)).apply("take mug 3") for i in range(60)}
    assert pairs == {f"take {kind} {number}" for kind in ("cup", "mug") for number in (1, 2, 3)}


def test_what_stands_apart_keeps_its_name_and_binds_no_list() -> None:
    """The bowl of every kitchen holds a banana, whatever is grown; temperatures are sorted again."""
    fruit = Kind(("{}", "{} seed"), ("banana", "mango"), apart=("a red apple, a banana",))
    kitchen = "a bowl (containing a red apple, a banana, an orange)"
    garden = replace(
        room(kitchen, "a jar"), goal="Grow a banana.", hidden_state="temperature 10: banana seed, fig, jug"
    )
    renamed = [rename_episode(garden, Random(i), [fruit]) for i in range(9)]
    assert {episode.goal for episode in renamed} == {"Grow a banana.", "Grow a mango."}
    assert all(kitchen in episode.steps[0].observation for episode in renamed)
    grown = next(episode for episode in renamed if "mango" in episode.goal)
    assert grown.hidden_state == "temperature 10: fig, jug, mango seed"


@pytest.mark.parametrize(("task", "name"), [("grow-fruit", "banana"), ("melt", "chocolate")])
def test_what_a_task_is_about_takes_names_that_training_lacks(task: str, name: str) -> None:
    episode = replace(room("a door", f"a substance called {name}", task=task), goal=f"It is about {name}.")
    drawn = {rename_episode(episode, Random(i)).goal for i in range(40)}
    assert len(drawn) > 3


def test_barred_tasks_keep_their_names() -> None:
    animals = Kind(("{}",), ("dove", "wolf"), barred=("lifespan",))
    draws = [
        rename_episode(room("a dove", task=t), Random(i), [animals]) for i in range(9) for t in ("lifespan-1", "find")
    ]
    assert all("dove" in texts_of(episode)[1] for episode in draws[::2])
    assert any("wolf" in texts_of(episode)[1] for episode in draws[1::2])


def test_a_renaming_that_would_collide_is_refused_and_named() -> None:
    """A glass cup becomes a tin cup, which is there already as a name of another kind."""
    kinds = [Kind(("{}",), ("glass", "tin")), Kind(("{}",), ("tin cup", "wood cup"))]
    messages = set()
    for i in range(20):
        try:
            rename_episode(room("a glass cup", action="take tin cup"), Random(i), kinds)
        except RenamingError as error:
            messages.add(str(error))
    assert "a name would collide with another in '\\ta glass cup'" in messages


def test_what_came_of_renamings_is_said() -> None:
    refused = "boil, variation 1: a name would collide with another in 'x'"
    outcomes = Counter({RENAMED: 3, NOT_DRAWN: 9, refused: 2})
    said = f"3 renamed, 0 without such names, 2 left as they are ({refused})"
    assert describe_renamings(outcomes) == said


def test_the_command_renames_by_seed_and_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "e.jsonl"
    write_episodes(source, [*episodes_of("alfworld-500-noisy", 10), room("a table")])

    def tokens(name: str, *options: str) -> bytes:
        arguments = ["--episodes", str(source), "--out", str(tmp_path / name), *options]
        status = main(["tokenize-renamed", *arguments]) if options else tokenize(["tokenize", *arguments])
        assert status == 0
        return (tmp_path / name / "00000.tokens.npy").read_bytes()

    plain, once = tokens("plain"), tokens("once", "--rename", "1", "--seed", "4")
    assert "renamed" not in capsys.readouterr().out.splitlines()[0]
    assert plain == tokens("none", "--rename", "0")
    assert once == tokens("again", "--rename", "1", "--seed", "4")
    assert len({plain, once, tokens("other", "--rename", "1", "--seed", "5")}) == 3
    metas = [(tmp_path / name / "00000.episodes.json").read_text() for name in ("plain", "once")]
    assert metas[0] == metas[1], "a renamed episode counts as its original"
    said = re.search(
        r"^(\d+) renamed, (\d+) without such names, 0 left as they are$", capsys.readouterr().out, re.MULTILINE
    )
    assert said
    assert int(said[1]) > 5
    assert int(said[1]) + int(said[2]) == 11
    assert main(["tokenize-renamed", "--episodes", str(source), "--out", str(tmp_path / "bad"), "--rename", "1.5"]) == 2
    assert capsys.readouterr().err == "error: --rename: must be 0 to 1\n"
    order = RenamingPlan(0.3, 0)
    drawn = [order.carry_out(e, str(i))[1] for e in read_episodes(source) for i in range(40) if e.env == "alfworld"]
    assert drawn.count(NOT_DRAWN) / len(drawn) == pytest.approx(0.7, abs=0.08)
    assert drawn.count(RENAMED) > 30


def test_names_are_matched_whole_and_longest_first_in_one_pass() -> None:
    renaming = Renaming({"dove": "wolf", "wolf": "dove", "dove egg": "wolf's den", "wolf's den": "dove egg"})
    assert renaming.substitute("dove egg, wolf, doves, dove-grey, dove") == "wolf's den, dove, doves, dove-grey, wolf"


def test_contradicting_episodes_are_skipped_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make_episode()
    write_episodes(tmp_path / "e.jsonl", [good, replace(good, goal="another"), make_episode(policy="noisy-expert")])
    arguments = ["tokenize-renamed", "--episodes", str(tmp_path / "e.jsonl"), "--out", str(tmp_path / "out")]
    problem = "e.jsonl: line 2: goal: boil, variation 0, began otherwise in an earlier episode"
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err
    assert main([*arguments, "--skip-contradictions"]) == 0
    assert f"skipped: {tmp_path}/{problem}" in capsys.readouterr().err
    assert check_shards(tmp_path / "out", tokenizer_hash())["episodes"] == 2
