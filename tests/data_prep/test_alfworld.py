"""The engine itself plays in most of these; without the extra `alfworld` only the rest is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from data_prep.__main__ import main
from data_prep.environments.alfworld import environment as module
from data_prep.environments.alfworld.environment import AlfWorld
from data_prep.environments.alfworld.games import EXCLUDED_PLANS, TASKS, build_game, list_games
from data_prep.environments.alfworld.hidden import listed
from data_prep.environments.base import SimulatorError
from data_prep.policies import random_action
from data_prep.windows import Cut, cut_window
from loopwm.records.episodes import Episode, Step, read_episodes
from loopwm.records.errors import InputError
from loopwm.records.files import line_files
from loopwm.records.template import CONTEXT_KINDS, render_context, window_context
from tests.fixtures.episodes import as_answered, check_that_kills_change_nothing, play_once

from .test_alfworld_texts import listings

needs_engine = pytest.mark.skipif(
    any(find_spec(package) is None for package in AlfWorld.packages),
    reason="the extra 'alfworld' is not installed (installing it needs g++ and make)",
)
SUITE = Path(__file__).parents[2] / "eval/suites/alfworld-500.jsonl.gz"
ORIGINAL_GAMES = os.environ.get("ALFWORLD_DATA")
"""Where original games are, before a test says otherwise."""
SMALL = "built/pick_two_obj_and_place-329-61"
"""Six receptacles: quick to ground."""


@pytest.fixture(scope="session")
def alfworld() -> Iterator[AlfWorld]:
    environment = AlfWorld()
    yield environment
    environment.close()


@pytest.fixture(scope="session")
def noisy(alfworld: AlfWorld) -> Episode:
    return play_once(alfworld, "noisy-expert", "pick_two_obj_and_place", SMALL, "built", 40, seed=2)


@pytest.fixture
def game_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Games in ALFWorld's layout: some to be seen, one to train on, and bad ones."""
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    root = tmp_path / "json_2.1.1"
    good = build_game(SMALL)
    files = {
        "train/pick_two_obj_and_place-Pen-None-SideTable-329/good": json.dumps(good),
        "valid_seen/pick_two_obj_and_place-Pen-None-SideTable-329/good": json.dumps(good),
        "valid_seen/pick_two_obj_and_place-Pen-None-SideTable-329/unsolved": json.dumps({**good, "solvable": None}),
        "valid_seen/pick_two_obj_and_place-Pen-None-SideTable-329/old": json.dumps(good).replace("move {o}", "put {o}"),
        "valid_seen/pick_two_obj_and_place-Pen-None-SideTable-329/cut": json.dumps(good).replace('"pddl_problem"', ""),
        "valid_seen/pick_two_obj_and_place-Pen-None-SideTable-329/garbled": json.dumps(
            {**good, "pddl_problem": good["pddl_problem"].replace("(inReceptacle ?", "(nonsense ?")}
        ),
    }
    for name, text in files.items():
        (root / name).mkdir(parents=True)
        (root / name / "game.tw-pddl").write_text(text)
    return tmp_path


def replayed(environment: AlfWorld, episode: Episode) -> tuple[Step, ...]:
    steps = [environment.reset(episode.task, episode.variation)]
    return (*steps, *(environment.step(step.action) for step in episode.steps if step.action is not None))


@needs_engine
@pytest.mark.parametrize("task", TASKS)
def test_a_built_game_is_won_by_its_plan(alfworld: AlfWorld, task: str) -> None:
    name = SMALL if task in SMALL else Random(task).choice(list_games(task))
    episode = play_once(alfworld, "expert", task, name, "built", 200)
    assert [step.done for step in episode.steps] == [False] * (len(episode.steps) - 1) + [True]
    assert (episode.steps[-1].score, episode.policy) == (100, "expert")
    assert not [step for step in episode.steps if step.observation == "Nothing happens."]
    assert episode.goal.startswith("Your task is to: ")
    assert episode.goal in episode.steps[0].observation


@needs_engine
def test_a_game_follows_from_its_name_alone() -> None:
    code = "import sys, hashlib; from data_prep.environments.alfworld.games import build_game; "
    code += "print(hashlib.sha256(repr(build_game(sys.argv[1])).encode()).hexdigest())"
    builds = {
        subprocess.run(
            [sys.executable, "-c", code, SMALL], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(builds) == 1
    assert build_game(SMALL) != build_game(SMALL.replace("-61", "-62"))


@needs_engine
def test_excluded_floor_plans_never_appear() -> None:
    assert set(EXCLUDED_PLANS) == {9, 10, 29, 215, 219, 226, 308, 315, 325, 404, 424, 425}
    plans = {task: {int(name.split("-")[1]) for name in list_games(task)} for task in TASKS}
    assert not set.union(*plans.values()) & EXCLUDED_PLANS
    assert len(plans["pick_and_place_simple"]) == 120 - len(EXCLUDED_PLANS)
    assert min(map(len, plans.values())) > 20
    with pytest.raises(InputError, match="floor plan 10: excluded"):
        build_game("built/pick_and_place_simple-10-0")


@needs_engine
@pytest.mark.parametrize("name", ["built/pick", "built/fly-1-0", "built/look_at_obj_in_light-1-0", "built/pick-one-0"])
def test_a_name_of_no_game_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="alfworld: "):
        build_game(name)


@needs_engine
def test_the_same_actions_bring_the_same_steps(alfworld: AlfWorld, noisy: Episode) -> None:
    """In an engine that played other things since, and in a fresh one."""
    alfworld.reset("pick_two_obj_and_place", SMALL.replace("-61", "-60"))
    assert replayed(alfworld, noisy) == as_answered(noisy)
    fresh = AlfWorld()
    try:
        assert replayed(fresh, noisy) == as_answered(noisy)
        again = play_once(fresh, "noisy-expert", noisy.task, noisy.variation, "built", 40, seed=2)
        assert again == noisy
    finally:
        fresh.close()


@needs_engine
def test_noise_strays_and_finds_back(alfworld: AlfWorld, noisy: Episode) -> None:
    assert noisy.steps[-1].done
    gold = alfworld.gold_actions(noisy.task, noisy.variation)
    actions = [step.action for step in noisy.steps[1:]]
    assert len(actions) > len(gold)
    assert "Nothing happens." in [step.observation for step in noisy.steps]
    assert "look around" not in actions


def check_views(look: str, hidden: str) -> int:
    """Whatever is seen now stands in the hidden state, word for word. Returns how many lines were looked for."""
    facing, *views = look.splitlines()
    for view in views:
        assert view in hidden.splitlines() or (view.endswith("is closed.") and f"{view} In it, you see" in hidden)
    if ", and " in facing.partition(".")[0]:
        assert facing.replace("You are facing", "Facing") in hidden
    else:
        assert facing.endswith("Next to it, you see nothing.")
    return 1 + len(views)


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("split", ["built", "train"])
def test_the_hidden_state_is_what_the_game_prints_in_its_order(
    alfworld: AlfWorld, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """All views and lists of 12 games with much taking and moving, of which a few place two receptacles together."""
    if split == "train" and not ORIGINAL_GAMES:
        pytest.skip("ALFWORLD_DATA names no original games")
    games = [(task, name) for task in TASKS for name in alfworld.variations(task, split)]
    rng, lines, lists = Random(0), 0, []
    for task, name in rng.sample(games, 12):
        alfworld.reset(task, name)
        for _ in range(30):
            moves = [a for a in alfworld.valid_actions() if a.startswith(("take", "move", "open"))]
            action = rng.choice(moves) if moves and rng.random() < 0.6 else random_action(alfworld, rng)
            step = alfworld.step(action)
            hidden = alfworld.hidden_state()
            assert step.look
            assert hidden
            lists += [names for text in (step.observation, step.look) for names in listings(text)]
            lines += check_views(step.look, hidden) if step.look.startswith("You are facing") else 0
    assert all(names == sorted(names, key=listed) for names in lists)
    assert len(lists) > 100
    assert lines > 500


@needs_engine
def test_where_a_thing_was_taken_from_is_told_since_look_depends_on_it(alfworld: AlfWorld) -> None:
    """A thing moved to another receptacle of the same place lies "next to it" from then on, as the grammar has it."""
    game = "built/look_at_obj_in_light-320-26"
    alfworld.reset("look_at_obj_in_light", game)
    for action in ("go to desk 2", "take pen 2 from desk 2"):
        alfworld.step(action)
    held = alfworld.hidden_state() or ""
    moved = alfworld.step("move pen 2 to shelf 2").look or ""
    there = alfworld.hidden_state() or ""
    alfworld.step("go to bed 1")
    facing = "acing the desk 2, and shelf 2. Next to it, you see"
    assert f"F{facing} nothing. You took a pen 2 from the desk 2." in held.splitlines()
    assert f"You are f{facing} a pen 2." in moved.splitlines()
    assert f"F{facing} a pen 2. You took a pen 2 from the desk 2." in there.splitlines()
    assert alfworld.hidden_state() == there


@needs_engine
def test_an_episode_renders_in_every_context(alfworld: AlfWorld, noisy: Episode) -> None:
    *_, now = replayed(alfworld, replace(noisy, steps=noisy.steps[:3]))
    assert now == noisy.steps[2]
    window = cut_window(Cut(noisy, 2, "w"), 2, alfworld.hidden_state())
    texts = {context_kind: render_context(window_context(window, context_kind)) for context_kind in CONTEXT_KINDS}
    assert len(set(texts.values())) == len(CONTEXT_KINDS)
    assert all(noisy.goal in text and noisy.steps[2].observation.strip() in text for text in texts.values())
    assert "drawer 2 is closed. In it, you see" in texts["full"]


@needs_engine
def test_looking_is_free_and_says_what_the_game_says(alfworld: AlfWorld) -> None:
    first = alfworld.reset("pick_two_obj_and_place", SMALL)
    assert first.look is not None
    assert first.look in first.observation
    alfworld.step("go to drawer 1")
    opened = alfworld.step("open drawer 1")
    hidden = alfworld.hidden_state()
    assert hidden is not None
    assert alfworld.valid_actions() == alfworld.valid_actions()
    assert alfworld.hidden_state() == hidden
    look, examined, inventory = (alfworld.step(action) for action in ("look", "examine drawer 1", "inventory"))
    assert opened.look == f"{look.observation}\n{examined.observation}"
    assert opened.inventory == inventory.observation
    assert examined.observation.split("you see")[0] in hidden
    assert "help" not in alfworld.valid_actions()


@needs_engine
@pytest.mark.slow
def test_a_step_is_what_textworld_itself_reports(alfworld: AlfWorld, tmp_path: Path) -> None:
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    (tmp_path / "game.tw-pddl").write_text(json.dumps(build_game(SMALL)))
    package = AlfredDemangler(textworld.envs.PddlEnv(textworld.EnvInfos(admissible_commands=True)))
    package.load(str(tmp_path / "game.tw-pddl"))
    plan = alfworld.gold_actions("pick_two_obj_and_place", SMALL)
    state = package.reset()
    assert alfworld.reset("pick_two_obj_and_place", SMALL).observation == state.feedback
    for action in ("look", "fly", *plan):
        assert [*alfworld.valid_actions(), "help"] == sorted(
            state["admissible_commands"], key=lambda c: (c == "help", c)
        )
        state, score, done = package.step(action)
        ours = alfworld.step(action)
        assert (ours.observation, ours.score, ours.done) == (state.feedback, 100 * score, done)


@needs_engine
@pytest.mark.slow
def test_killed_and_restarted_yields_the_same_set(tmp_path: Path) -> None:
    order = "alfworld --split built --policy noisy-expert --episodes-per-task 1 --max-steps 20"
    options = [*order.split(), "--tasks", "pick_two_obj_and_place", "look_at_obj_in_light", "pick_and_place_simple"]
    check_that_kills_change_nothing(options, tmp_path, seed=0)


@needs_engine
def test_splits_hold_games_of_their_own(alfworld: AlfWorld, game_files: Path) -> None:
    names = {split: alfworld.variations("pick_two_obj_and_place", split) for split in ("train", "valid_seen", "built")}
    assert names["train"] == ["train/pick_two_obj_and_place-Pen-None-SideTable-329/good"]
    assert all(name.startswith("valid_seen/") for name in names["valid_seen"])
    assert all(name.startswith("built/") for name in names["built"])
    assert alfworld.variations("look_at_obj_in_light", "train") == []
    with pytest.raises(InputError, match=r"ALFWORLD_DATA: no games under .*/json_2\.1\.1/valid_unseen; run"):
        alfworld.variations("pick_and_place_simple", "valid_unseen")


@needs_engine
def test_bad_games_are_named_and_the_others_are_played(
    game_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--split valid_seen --policy expert --episodes-per-task 9 --out {tmp_path / 'out'}"
    assert main(["collect", "alfworld", *options.split()]) == 0
    said = capsys.readouterr()
    assert "skipped 1 games not marked solvable, such as valid_seen/pick_two" in said.err
    assert "skipped 1 games of another grammar version, such as valid_seen/pick_two" in said.err
    assert "329/garbled: SystemExit: Undeclared predicate: nonsense" in said.err
    assert "329/cut: game.tw-pddl: JSONDecodeError" in said.err
    assert "1 episodes," in said.out
    assert "2 episodes failed" in said.out
    (episode,) = [e for path in line_files([tmp_path / "out"]) for e in read_episodes(path)]
    assert episode.variation == "valid_seen/pick_two_obj_and_place-Pen-None-SideTable-329/good"


@pytest.mark.parametrize(
    ("code", "message"), [("input()", "the engine died"), ("import time; time.sleep(60)", "no ans")]
)
def test_an_engine_that_dies_or_hangs_is_ended_and_replaced(
    monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    def start() -> subprocess.Popen[bytes]:
        answer = "import json; input(); print(json.dumps({'result': []}), flush=True)"
        return subprocess.Popen(
            [sys.executable, "-c", codes.pop(0) if codes else answer],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    codes = [code]
    monkeypatch.setattr(module, "_start_engine", start)
    engine = module._Engine()
    monkeypatch.setattr(module, "TIME_LIMIT", 0.2 if "sleep" in code else 60)
    with pytest.raises(SimulatorError, match=message):
        engine.call("facts")
    monkeypatch.setattr(module, "TIME_LIMIT", 60)
    assert engine.call("facts") == []
    engine.close()


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(AlfWorld, "packages", ("no_such_package",))
    options = ["--split", "built", "--policy", "expert", "--episodes-per-task", "1", "--out", "unused"]
    assert main(["collect", "alfworld", *options]) == 2
    assert capsys.readouterr().err == (
        "error: alfworld: the package no_such_package is not installed; pip install 'loopwm[alfworld]'\n"
    )
