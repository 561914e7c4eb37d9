"""Suites: the mix of families, what they are cut from, and what the committed ones hold."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep.environments import ENVIRONMENTS
from data_prep.environments.alfworld.environment import held_out
from data_prep.environments.alfworld.games import SEEDS
from data_prep.environments.scienceworld.environment import ScienceWorld
from lab.__main__ import main
from lab.data.cut_suite import PAPER_MIX, RECIPES, cut_mix, read_windows, scaled_mix
from loopwm.records.episodes import write_episodes
from tests.fixtures.episodes import make_episode

ROOT = Path(__file__).parents[3]


def test_short_episodes_weigh_as_much_as_long_ones() -> None:
    episodes = [
        make_episode(variation=0, length=400),
        make_episode(variation=1, length=400),
        make_episode(variation=2, length=104),
    ]
    cuts = cut_mix(episodes, {"Boil": 150}, 5, seed=0, name="w")
    assert 35 < sum(cut.episode.variation == 2 for cut in cuts) < 65


def test_the_paper_mix_has_every_family_and_scales() -> None:
    for env, mix in PAPER_MIX.items():
        assert set(mix) == set(ENVIRONMENTS[env].families)
    assert sum(PAPER_MIX["scienceworld"].values()) == sum(PAPER_MIX["alfworld"].values()) == 500
    assert sum(len(tasks) for tasks in ENVIRONMENTS["scienceworld"].families.values()) == 30
    assert scaled_mix("scienceworld", 1000) == {f: 2 * n for f, n in PAPER_MIX["scienceworld"].items()}
    assert sum(scaled_mix("scienceworld", 77).values()) == 77


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"split": "train"},
            "--episodes: split: must be 'test' for the suite, got 'train' in boil",
        ),
        (
            {"split": "test", "policy": "random"},
            "--episodes: policy: must be 'gold' for the suite, got 'random'",
        ),
        ({"split": "test"}, "family Incline: episodes must hold 150 windows, found 0"),
    ],
)
def test_cut_suite_of_unfit_episodes_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_episodes(tmp_path / "e.jsonl", [make_episode(**changes)])
    out = tmp_path / "w.jsonl.gz"
    options = ["--suite", "scienceworld-500", "--out", str(out)]
    assert main(["cut-suite", "--episodes", str(tmp_path / "e.jsonl"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def committed(name: str) -> list[dict[str, Any]]:
    return read_windows(ROOT / f"eval/suites/{name}.jsonl.gz")


def check_variations(windows: list[dict[str, Any]], simulator: ScienceWorld, split: str) -> None:
    """All are of that split, none is trained on."""
    assert {w["split"] for w in windows} == {split}
    for task in sorted({w["task"] for w in windows}):
        used = {w["variation"] for w in windows if w["task"] == task}
        assert used <= set(simulator.variations(task, split))
        assert not used & set(simulator.variations(task, "train"))


def is_held_out(game: str, split: str) -> bool:
    """Whether an ALFWorld game is of a split that nobody trains on."""
    if split == "valid_seen":
        return game.startswith("valid_seen/")
    built = re.fullmatch(r"built/\w+-\d+-(\d+)", game)
    return int(built[1]) == SEEDS if built else held_out(game)


@pytest.mark.parametrize("name", RECIPES)
def test_a_suite_has_the_paper_mix_hidden_states_and_no_training_variation(simulator: ScienceWorld, name: str) -> None:
    suite, windows = RECIPES[name], committed(name)
    assert Counter(w["family"] for w in windows) == suite.mix
    assert len({w["id"] for w in windows}) == len(windows) == sum(suite.mix.values())
    assert {(w["env"], len(w["actions"])) for w in windows} == {(suite.env, suite.horizon)}
    assert all(w["hidden_state"] and w["hidden_state_start"] and w["look"] and w["inventory"] for w in windows)
    if suite.env == "scienceworld":
        check_variations(windows, simulator, suite.split)
    else:
        assert all(is_held_out(w["variation"], suite.split) for w in windows)


def test_noisy_suites_hold_refusals_which_solvers_hardly_ever_get() -> None:
    for env, refusal in (("scienceworld", "No known action matches that input."), ("alfworld", "Nothing happens.")):
        gold, noisy = (
            sum(observation == refusal for window in committed(name) for observation in window["observations"])
            for name in (f"{env}-500", f"{env}-500-noisy")
        )
        assert noisy > max(50, 10 * gold)


@pytest.mark.parametrize("env", PAPER_MIX)
def test_a_counterfactual_suite_holds_pairs_of_suite_windows(env: str) -> None:
    windows = committed(f"{env}-counterfactual")
    known = {w["id"]: w for w in committed(f"{env}-500")}
    for fact, other in zip(windows[::2], windows[1::2], strict=True):
        assert fact == {**known[fact["id"].removeprefix(f"{env}-counterfactual/")[:-5]], "id": fact["id"]}
        assert {key for key in fact if fact[key] != other[key]} <= {"id", "actions", "observations", "rewards", "dones"}
        changed = [i for i, (a, b) in enumerate(zip(fact["actions"], other["actions"], strict=True)) if a != b]
        assert len(changed) == 1
        assert changed[0] < len(fact["actions"]) - 1
        assert fact["observations"][: changed[0]] == other["observations"][: changed[0]]
        assert fact["observations"][-1] != other["observations"][-1]
    assert len({w["id"] for w in windows}) == len(windows) == 400


def test_dev_windows_are_of_dev_variations(simulator: ScienceWorld) -> None:
    windows = read_windows(ROOT / "tests/data/dev-100.jsonl.gz")
    assert Counter(w["family"] for w in windows) == Counter(scaled_mix("scienceworld", 100))
    check_variations(windows, simulator, "dev")
