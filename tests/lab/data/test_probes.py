"""Probes: what is read of a place, what is tried there, and the suites that are cut of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from data_prep.environments.scienceworld.environment import ScienceWorld
from data_prep.policies import FATAL, POLICIES
from lab.__main__ import main
from lab.data import alfworld_probes as alfworld
from lab.data import collect_probes, probe_windows
from lab.data import scienceworld_probes as scienceworld
from lab.data.cut_suite import read_windows
from lab.data.probe_windows import cut_probes, ends_in_look_at_change, families_in_turn, is_answerable
from lab.data.probes import KINDS, OUTSIDE, PLACES, absent_name, altered_name
from loopwm.records.episodes import Episode, Step
from loopwm.records.errors import InputError
from tests.fixtures.episodes import as_answered, play_once
from tests.fixtures.toy import Toy
from tests.lab.data.test_cut_suite import check_variations, is_held_out

SUITES = Path(__file__).parents[3] / "eval/suites"

KITCHEN = (
    "This room is called the kitchen. In it, you see: \n\tthe agent\n\ta substance called air\n"
    "\ta counter. On the counter is: a bowl (containing a red apple, an orange), a drawer.\n"
    "\ta fridge. The fridge door is closed. \n\ta sink, which is turned off. In the sink is: nothing.\n"
    "\ta tin cup (containing liquid unknown substance V)\nYou also see:\n"
    "\tA door to the bathroom (that is closed)\n\tA door to the hallway (that is open)\n"
)
HELD = "In your inventory, you see:\n\ta thermometer, currently reading a temperature of 10 degrees celsius\n"
IN_KITCHEN = Step("look around", KITCHEN, 0, False, KITCHEN, HELD)

AT_FRIDGE = Step(
    "open fridge 1", "", 0, False,
    "You are facing the fridge 1, and drawer 2. Next to it, you see nothing.\n"
    "The fridge 1 is open. In it, you see a apple 2, and a cup 1.\nThe drawer 2 is closed.",
    "You are carrying: a mug 1.",
)  # fmt: skip
PLACES_THERE = ["fridge 1", "drawer 2", "shelf 3", "microwave 1"]


def drawn(kind: str, count: int = 300) -> list[list[str]]:
    return [scienceworld.draw_probe(kind, IN_KITCHEN, Random(seed)) for seed in range(count)]


def drawn_at_fridge(kind: str, count: int = 300) -> list[list[str]]:
    return [alfworld.draw_probe(kind, AT_FRIDGE, PLACES_THERE, Random(seed)) for seed in range(count)]


def test_scene_of_room_has_things_lids_and_doors() -> None:
    scene = scienceworld.Scene.of(IN_KITCHEN)
    assert (scene.room, scene.doors) == ("kitchen", {"bathroom": False, "hallway": True})
    assert [(t.name, t.lid, t.switch) for t in scene.things if t.name in ("fridge", "sink")] == [
        ("fridge", "closed", ""),
        ("sink", "", "off"),
    ]
    assert {"bowl", "red apple", "orange", "drawer", "liquid unknown substance V"} <= set(scene.names())
    assert [thing.name for thing in scene.held] == ["thermometer"]
    assert not {"nothing", "door", "kitchen"} & set(scene.names())
    assert {"fridge", "red apple"}.isdisjoint(scene.holders())
    assert {"counter", "bowl", "sink", "tin cup"} <= set(scene.holders())


def test_scene_at_place_has_lids_contents_and_hand() -> None:
    scene = alfworld.Scene.of(AT_FRIDGE)
    assert scene.lids == {"fridge 1": "open", "drawer 2": "closed"}
    assert scene.contents == {"fridge 1": ("apple 2", "cup 1"), "drawer 2": ()}
    assert scene.held == "mug 1"


@pytest.mark.parametrize("kind", KINDS)
def test_probe_with_same_seed_is_the_same(kind: str) -> None:
    assert drawn(kind, 50) == drawn(kind, 50)
    assert drawn_at_fridge(kind, 50) == drawn_at_fridge(kind, 50)
    for probes in (drawn(kind), drawn_at_fridge(kind)):
        assert len(set(map(tuple, probes))) > 100
        assert all(action.strip() and action.split()[0] not in FATAL for probe in probes for action in probe)


def test_absent_probe_names_things_of_both_worlds() -> None:
    said = "\n".join(action for probe in drawn("absent", 1000) for action in probe)
    assert any(word in said for word in OUTSIDE)
    assert all(word in said for word in ("alarmclock", "pick up", "eat", "look at"))
    for seed in range(300):
        name = absent_name(("iron", "thermometer"), ("mug",), KITCHEN + HELD, (), Random(seed))
        assert name not in ("thermometer",)


def test_altered_name_is_part_or_extension() -> None:
    names = {altered_name(("ice cream", "sink"), Random(seed)) for seed in range(200)}
    assert {"ice", "cream"} <= names
    assert any(name.startswith(("sink ", "ice cream ")) for name in names)
    assert {"ice cream", "sink"}.isdisjoint(names)


def test_unreachable_probe_goes_through_no_open_door() -> None:
    said = [action for probe in drawn("unreachable") for action in probe if action.startswith("go to")]
    assert "go to hallway" not in said
    assert {"go to bathroom", "go to foundry"} <= set(said)
    assert any(action.removeprefix("go to ") in PLACES for action in said)


def test_permanence_probe_looks_after_change() -> None:
    for probes, looks in (
        (drawn("permanence"), ("look", "inventory")),
        (drawn_at_fridge("permanence"), ("look", "examine", "inventory")),
    ):
        for probe in probes:
            assert not probe[0].startswith(looks)
            assert any(action.startswith(looks) for action in probe[1:])
    picked = next(probe for probe in drawn("permanence") if probe[0].startswith("pick up"))
    thing = picked[0].removeprefix("pick up ")
    assert any(
        action.endswith(f" {thing}") and action.startswith(("drop", "put")) for action in picked
    ) or "go to" in str(picked)


def test_repetition_probe_repeats_an_action() -> None:
    for probe in (*drawn("repetition"), *drawn_at_fridge("repetition")):
        assert 2 <= Counter(probe).most_common(1)[0][1] <= 5


collect_probes.register()


@pytest.fixture
def toy_prober(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = lambda environment, kind, step, rng: environment.probe(kind, step, rng)  # noqa: E731
    monkeypatch.setitem(collect_probes.PROBERS, Toy.name, probe)


class Probed(Toy):
    """A toy that is tried with one request that is ambiguous."""

    def probe(self, kind: str, step: Step, rng: Random) -> list[str]:
        return [f"try {kind} after {step.action}", "take cup"]


@pytest.mark.usefixtures("toy_prober")
def test_act_probe_if_ambiguous_answers_number() -> None:
    played, path = probe_actions(["north", "south"] * 20)
    assert played[0] == Toy.looks[0]
    for action, then in pairwise(played):
        assert then.isdecimal() == (action == "take cup")
    tries = [action for action in played if action.startswith("try")]
    assert {kind for kind in KINDS for action in tries if kind in action} == set(KINDS)
    assert "try absent after north" in tries or "try absent after south" in tries or len(tries) > 20
    assert [action for action in played if action in ("north", "south")] == path


def probe_actions(path: Sequence[str]) -> tuple[list[str], list[str]]:
    actions = POLICIES["probe"].act(Probed(), path, Random(4))
    played = [next(actions)]
    with suppress(StopIteration):
        while len(played) < 400:
            told = "Ambiguous request: which?\n0:\ta\n1:\tb\n" if played[-1] == "take cup" else "done"
            played.append(actions.send(Step(played[-1], told, 0, False)))
    return played, list(path)


def test_act_probe_without_prober_is_refused() -> None:
    with pytest.raises(InputError, match="environment: must be one of scienceworld, alfworld"):
        next(POLICIES["probe"].act(Toy(), [], Random(0)))


def test_act_probe_played_twice_is_the_same(simulator: ScienceWorld) -> None:
    def played() -> list[Episode]:
        return [play_once(simulator, "probe", "find-non-living-thing", 3, "train", 40, seed) for seed in range(4)]

    first, again = played(), played()
    assert list(map(as_answered, first)) == list(map(as_answered, again))
    answers = [step.observation for episode in first for step in episode.steps]
    assert 0.05 < answers.count("No known action matches that input.") / len(answers) < 0.6


def test_families_in_turn_yields_every_window_once() -> None:
    windows = [{"family": f, "id": f"{f}{i}"} for f, n in (("A", 3), ("B", 1), ("C", 2)) for i in range(n)]
    found = [window["id"] for window in families_in_turn(windows, Random(0))]
    assert [name[0] for name in found] == ["A", "B", "C", "A", "C", "A"]
    assert sorted(found) == sorted(window["id"] for window in windows)


def test_is_answerable_if_name_is_unseen_is_false() -> None:
    known, unknown = Step("look in bowl", "Inside the bowl is: \n\ta red apple", 0, False), "a banana"
    assert is_answerable("scienceworld", [KITCHEN], [known])
    assert not is_answerable("scienceworld", [KITCHEN], [known, Step("look in drawer", unknown, 0, False)])
    assert is_answerable("scienceworld", [KITCHEN], [Step("pick up banana", unknown, 0, False)])


def test_is_answerable_if_contents_are_unseen_is_false() -> None:
    arrival = Step("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see nothing.", 0, False)
    assert not is_answerable("alfworld", ["you see a drawer 2, and a shelf 1."], [arrival])
    assert is_answerable("alfworld", ["On the shelf 1, you see a mug 1."], [arrival])


def test_ends_in_look_at_change_needs_change_then_none() -> None:
    def at(look: str, held: str, hidden: str) -> Step:
        return Step("a", "", 0, False, look, held, hidden)

    before, taken, elsewhere = at("room", "", "cup in room"), at("room", "cup", "room"), at("hall", "", "cup in room")
    assert ends_in_look_at_change([before, taken, taken])
    assert not ends_in_look_at_change([before, before, taken])
    assert not ends_in_look_at_change([before, before, before])
    assert not ends_in_look_at_change([before, elsewhere, elsewhere])


class Room(Probed):
    """Answers each action by its number; the fourth ends the episode."""

    ends = 99

    def reset(self, task: str, variation: int | str) -> Step:
        self.count = 0
        return super().reset(task, variation)

    def step(self, action: str) -> Step:
        self.count += 1
        return Step(action, f"answer {self.count}", 0, self.count >= self.ends, f"look {self.count // 2}", "")


@pytest.mark.usefixtures("toy_prober")
def test_cut_probes_takes_kinds_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_windows, "is_answerable", lambda *_: True)
    monkeypatch.setattr(probe_windows, "ends_in_look_at_change", lambda _: True)
    source = {"task": "walk", "variation": 3, "family": "A", "goal": "stop", "split": "test"}
    history = [{"action": None, "observation": "walk 3"}]
    windows = [{**source, "id": f"w{i}", "history": history} for i in range(12)]
    cut = list(cut_probes(Room(), windows, 10, 5, 0, "toy-probe"))
    assert [window["family"] for window in cut] == list(KINDS) * 2
    assert [cut[1]["id"], cut[6]["id"]] == ["toy-probe/wrong-use/0000", "toy-probe/wrong-use/0001"]
    for window in cut:
        assert [step["action"] for step in window["history"]] == [None, *Toy.looks]
        assert window["observations"] == [f"answer {i}" for i in range(3, 8)]
        assert len(window["rewards"]) == len(window["dones"]) == len(window["actions"]) == 5
    monkeypatch.setattr(Room, "ends", 6)
    assert not list(cut_probes(Room(), windows, 10, 5, 0, "toy-probe"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--count", "0"], "--count, --horizon: must be >= 1"),
        (["--count", "9"], "found 0 windows, --count is 9"),
    ],
)
def test_probe_windows_with_bad_input_is_one_line(
    simulator: ScienceWorld,
    tmp_path: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ScienceWorld, "close", lambda self: None)
    monkeypatch.setattr(probe_windows, "make_environment", lambda name: simulator)
    monkeypatch.setattr(probe_windows, "families_in_turn", lambda *_: iter(()))
    out = tmp_path / "p.jsonl.gz"
    suite = SUITES / "scienceworld-dev.jsonl.gz"
    assert main(["probe-windows", "--windows", str(suite), "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_probe_windows_without_prober_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe_windows, "make_environment", lambda name: Toy())
    options = ["--windows", str(SUITES / "scienceworld-dev.jsonl.gz"), "--out", str(tmp_path / "p.jsonl.gz")]
    assert main(["probe-windows", *options]) == 2
    assert "scienceworld-dev.jsonl.gz: toy has no probes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["scienceworld-dev-probe", "scienceworld-probe", "alfworld-dev-probe", "alfworld-probe"]
)
def test_probe_suite_has_every_kind_and_is_held_out(simulator: ScienceWorld, name: str) -> None:
    windows: list[dict[str, Any]] = read_windows(SUITES / f"{name}.jsonl.gz")
    env, split = name.split("-")[0], "dev" if "-dev-" in name else "test"
    assert Counter(w["family"] for w in windows) == dict.fromkeys(KINDS, 40)
    assert len({w["id"] for w in windows}) == 200
    assert {(w["env"], len(w["actions"])) for w in windows} == {(env, 5)}
    assert all(w["hidden_state"] and w["hidden_state_start"] and w["look"] and w["inventory"] for w in windows)
    assert all(len(set(w["observations"])) >= probe_windows.DISTINCT for w in windows)
    if env == "scienceworld":
        check_variations(windows, simulator, split)
    else:
        assert all(is_held_out(w["variation"], "dev" if split == "dev" else "valid_seen") for w in windows)
