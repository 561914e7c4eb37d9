"""Whether states determine answers, on episodes in which it is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main
from lab.data.state_sufficiency import group_places, render, wilson_interval
from loopwm.records.episodes import Episode, Step, write_episodes

CLOSED = "The fridge 1 is closed. In it, you see a mug 1."
OPEN = CLOSED.replace("closed", "open")


def walk(variation: int, *pairs: tuple[str, str], hidden: str | None = CLOSED, task: str = "boil") -> Episode:
    """An episode of (action, observation) pairs; whatever happens, the state looks the same."""
    first = Step(None, "Begin.", 0, False, "look", "inventory")
    steps = [Step(action, answer, 0, False, "look", "inventory", hidden) for action, answer in pairs]
    return Episode("scienceworld", task, variation, "train", "random", "goal", (first, *steps), hidden)


def measure(folder: Path, *episodes: Episode) -> dict[str, list[str]]:
    """The cells of the table's rows by family."""
    write_episodes(folder / "e.jsonl", episodes)
    rows = render(group_places([folder / "e.jsonl"])).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {family: counts for _, family, *counts in cells}


def test_a_planted_disagreement_is_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """open: three places, of which one has another answer. wait: two that agree. go: only once."""
    write_episodes(
        tmp_path / "e.jsonl",
        [
            walk(0, ("open", "Opened."), ("wait", "You wait."), ("go", "Gone.")),
            walk(1, ("open", "Opened."), ("open", "Stuck.")),
            walk(2, ("wait", "You wait.")),
        ],
    )
    assert main(["state-sufficiency", "--episodes", str(tmp_path), "--examples", "3"]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "Boil" in line)
    assert row.startswith("| scienceworld | Boil | 2 | 5 | 40.00% | 50.00% |")
    assert said.count("scienceworld, Boil: 3 places") == 1
    assert f"answer ({tmp_path}/e.jsonl: line 1, after step 0, {tmp_path}/e.jsonl: line 2, after step 0):\n" in said
    assert f"answer ({tmp_path}/e.jsonl: line 2, after step 1):\n    Stuck." in said
    assert f"hidden state:\n    {CLOSED}\naction:\n    open\n" in said


@pytest.mark.parametrize("field", ["hidden_state", "look", "inventory", "goal"])
def test_places_that_differ_in_any_part_of_the_state_are_no_group(tmp_path: Path, field: str) -> None:
    one, other = walk(0, ("open", "Opened.")), walk(1, ("open", "Stuck."))
    assert measure(tmp_path, one, other)["Boil"][:3] == ["1", "2", "0.00%"]
    changed: dict[str, Any] = {field: OPEN}
    if field in ("hidden_state", "goal"):
        other = replace(other, **changed)
    else:
        other = replace(other, steps=(replace(other.steps[0], **changed), *other.steps[1:]))
    assert measure(tmp_path, one, other)["Boil"][0] == "0"


def test_what_the_same_actions_lead_to_is_one_place(tmp_path: Path) -> None:
    """A second play of a variation agrees up to where it departs, whatever the state leaves out."""
    one = walk(0, ("open", "Opened."), ("wait", "You wait."))
    assert measure(tmp_path, one, walk(0, ("open", "Opened."), ("go", "Gone.")))["Boil"][0] == "0"
    assert measure(tmp_path, one, walk(0, ("wait", "You wait."), ("go", "Gone.")))["Boil"][:2] == ["1", "2"]


def test_steps_without_a_hidden_state_are_no_places_and_families_stand_apart(tmp_path: Path) -> None:
    blind = walk(2, ("open", "Stuck."))
    sampled = replace(blind, steps=(blind.steps[0], replace(blind.steps[1], hidden_state=None)), hidden_state=None)
    rows = measure(tmp_path, walk(0, ("open", "Opened.")), walk(1, ("open", "Opened.")), sampled,
                   walk(0, ("open", "A."), task="melt"))  # fmt: skip
    assert rows["Boil"][:4] == rows["all"][:4] == ["1", "2", "100.00%", "100.00%"]
    assert rows["Melt"] == ["0", "0", "-", "-", "-"]


def test_the_wilson_interval_is_the_published_one() -> None:
    """Newcombe (1998), Statistics in Medicine 17, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for counts, interval in published.items():
        assert wilson_interval(*counts) == pytest.approx(interval, abs=5e-5)


def test_bad_hidden_states_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.jsonl"
    game = replace(walk(0, ("look", "You look.")), env="alfworld", task="pick_and_place_simple")
    faults = {
        "--episodes: no step with an action after it has a hidden state": walk(0, ("open", "Opened."), hidden=None),
        f"{path}: line 1: hidden_state after step 0: empty": walk(0, ("open", "Opened."), hidden=" \n"),
        f"{path}: line 1: hidden_state after step 0: not a line of one: 'The fridge 1 is ajar.'": replace(
            game, hidden_state=f"{OPEN}\nThe fridge 1 is ajar."
        ),
    }
    for message, episode in faults.items():
        write_episodes(path, [episode])
        assert main(["state-sufficiency", "--episodes", str(path)]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"
    assert main(["state-sufficiency", "--episodes", str(path), "--examples", "-1"]) == 2
    assert capsys.readouterr().err == "error: --examples: at least 0\n"
