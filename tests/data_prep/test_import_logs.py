"""Logs of a user's own environment become episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main
from data_prep.import_logs import split_of
from loopwm.records.episodes import format_episode, read_episodes
from loopwm.records.files import line_files

STEPS = [
    {"observation": "A shop. You see: a bell."},
    {"action": "ring bell", "observation": "Ding.", "reward": 1},
    {"action": "leave", "observation": "You are outside.", "reward": 2.5, "done": True},
]


def log(goal: str = "Ring the bell.", **changed: Any) -> dict[str, Any]:
    return {"goal": goal, "steps": STEPS, **changed}


def chat(*contents: str, system: str | None = "Ring the bell.") -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + turns}


def run_import(folder: Path, records: list[Any], *options: str) -> int:
    folder.mkdir(exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "logs.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    arguments = ["import", "--logs", str(folder / "logs.jsonl"), "--env", "shop", "--out", str(folder / "out")]
    return main([*arguments, "--dev", "0", "--test", "0", *options])


def test_import_of_steps_keeps_texts_rewards_and_ends(tmp_path, capsys):
    assert run_import(tmp_path, [log(), log(task="bells")]) == 0
    episodes = list(read_episodes(tmp_path / "out/train.jsonl.xz"))
    assert [(e.env, e.task, e.split, e.policy, e.goal) for e in episodes] == [
        ("shop", task, "train", "logs", "Ring the bell.") for task in ("shop", "bells")
    ]
    assert [(s.action, s.observation, s.score, s.done) for s in episodes[0].steps] == [
        (None, "A shop. You see: a bell.", 0, False),
        ("ring bell", "Ding.", 1, False),
        ("leave", "You are outside.", 3.5, True),
    ]
    assert "train: 2 episodes, 4 steps, 1 goals" in capsys.readouterr().out


@pytest.mark.parametrize("system", ["Ring the bell.", None])
def test_import_of_messages_alternates_observation_and_action(tmp_path, system):
    assert run_import(tmp_path, [chat("A shop.", "ring bell", "Ding.", "leave", system=system)]) == 0
    (episode,) = read_episodes(tmp_path / "out/train.jsonl.xz")
    assert episode.goal == (system or "A shop.")
    assert [(s.action, s.observation) for s in episode.steps] == [(None, "A shop."), ("ring bell", "Ding.")]


def test_import_drops_what_cannot_be_learned_and_says_why(tmp_path, capsys):
    surrogate = log(steps=[*STEPS[:1], {"action": "ring \ud800", "observation": "Ding."}])
    blank = log(steps=[*STEPS[:1], {"action": " ", "observation": "Ding."}])
    turns = {"messages": [{"role": "user", "content": "A shop."}] * 3}
    others = [log(task="t\ud800"), log(steps=[STEPS[0] | {"look": "\udfff"}, STEPS[1]])]
    assert run_import(tmp_path, [log(), log(steps=STEPS[:1]), surrogate, blank, blank, turns, *others]) == 0
    assert len(list(read_episodes(tmp_path / "out/train.jsonl.xz"))) == 1
    text = capsys.readouterr().out
    assert f"dropped: 2, blank goal, action or observation (first: {tmp_path}/logs.jsonl: line 4)" in text
    for reason in ("no step after", "lone surrogate", "do not alternate: user at turn 2"):
        assert f"{reason}" in text
    assert "dropped: 3, text that is not valid Unicode" in text


def test_import_leaves_no_split_of_an_earlier_import(tmp_path):
    records = [log(f"goal {number}") for number in range(20)]
    assert run_import(tmp_path, records, "--dev", "0.5") == 0
    assert (tmp_path / "out/dev.jsonl.xz").exists()
    assert run_import(tmp_path, records) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.jsonl.xz"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 2: not JSON"),
        ({"goal": "x"}, "line 2: steps: must be list, got nothing"),
        (log(goal=3), "line 2: goal: must be str, got int"),
        (log(steps=[{"observation": "x"}, {"observation": "y"}]), "line 2: steps[1].action: must be str, got nothing"),
        (log(steps=[{"action": "x", "observation": "x"}]), "line 2: steps[0].action: must be absent"),
        (log(steps=[*STEPS[:1], STEPS[1] | {"reward": "1"}]), "line 2: steps[1].reward: must be int or float, got str"),
        (log(steps=[*STEPS[:1], STEPS[1] | {"done": 1}]), "line 2: steps[1].done: must be bool, got int"),
        ({"messages": ["x"]}, "line 2: messages[0]: must be an object, got str"),
        (
            log(steps=[*STEPS[:1], STEPS[1] | {"reward": float("nan")}]),
            "line 2: steps[1].reward: must be a number below",
        ),
        (log(steps=[*STEPS[:1], STEPS[1] | {"reward": 10**400}]), "line 2: steps[1].reward: must be a number below"),
        ('{"seed": ' + "9" * 5000 + "}", "line 2: not JSON (a number too long"),
        ('{"goal": ' + "[" * 100_000, "line 2: not JSON (a number too long, or too deep a nesting)"),
    ],
)
def test_import_of_another_form_names_line_and_field(tmp_path, capsys, line, fault):
    assert run_import(tmp_path, [log(), line]) == 2
    error = capsys.readouterr().err
    assert fault in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_import_keeps_all_episodes_of_a_goal_in_one_split(tmp_path):
    goals = [f"Ring bell {i}." for i in range(200)]
    assert run_import(tmp_path, [log(goal) for goal in goals for _ in range(2)], "--dev", "0.2", "--test", "0.1") == 0
    by_split = {}
    for split in ("train", "dev", "test"):
        episodes = list(read_episodes(tmp_path / f"out/{split}.jsonl.xz"))
        assert {episode.split for episode in episodes} == {split}
        by_split[split] = {episode.goal for episode in episodes}
        assert len(episodes) == 2 * len(by_split[split])
    assert set.union(*by_split.values()) == set(goals)
    assert sum(map(len, by_split.values())) == 200
    assert 25 < len(by_split["dev"]) < 60
    assert split_of("Ring bell 1.", {"dev": 0.5}, 0) in ("train", "dev")


def test_import_splits_by_seed_and_keeps_splits_of_episodes(tmp_path):
    assert run_import(tmp_path, [log(seed=i) for i in range(40)], "--dev", "0.5") == 0
    splits = {split: list(read_episodes(tmp_path / f"out/{split}.jsonl.xz")) for split in ("train", "dev")}
    assert sum(map(len, splits.values())) == 40
    assert min(map(len, splits.values())) > 10
    arguments = ["import", "--logs", str(tmp_path / "out"), "--env", "shop", "--out", str(tmp_path / "again")]
    assert main([*arguments, "--dev", "0", "--test", "0"]) == 0
    assert list(read_episodes(tmp_path / "again/dev.jsonl.xz")) == splits["dev"]


def test_import_takes_built_games_for_train_and_drops_unknown_splits(tmp_path, capsys):
    assert run_import(tmp_path, [log()]) == 0
    (episode,) = read_episodes(tmp_path / "out/train.jsonl.xz")
    lines = [format_episode(replace(episode, split=split)) for split in ("built", "train", "validation")]
    assert run_import(tmp_path / "again", lines) == 0
    assert [one.split for one in read_episodes(tmp_path / "again/out/train.jsonl.xz")] == ["train", "train"]
    assert "dropped: 1, split 'validation', which is none of train, dev, test" in capsys.readouterr().out


def test_import_of_look_and_inventory_keeps_them(tmp_path):
    steps = [step | {"look": "A shop.", "inventory": "nothing"} for step in STEPS]
    assert run_import(tmp_path, [log(steps=steps)]) == 0
    (episode,) = read_episodes(tmp_path / "out/train.jsonl.xz")
    assert {(step.look, step.inventory) for step in episode.steps} == {("A shop.", "nothing")}


def test_import_into_the_folder_of_its_logs_is_refused(tmp_path, capsys):
    assert run_import(tmp_path, [log()]) == 0
    before = (tmp_path / "out/train.jsonl.xz").read_bytes()
    for logs, out in (("out", "out"), (".", "out"), ("out/train.jsonl.xz", ".")):
        paths = ["--logs", str(tmp_path / logs), "--out", str(tmp_path / out)]
        assert main(["import", "--env", "shop", *paths, "--dev", "0", "--test", "0"]) == 2
        assert "--out: must not be inside LOGS, nor LOGS inside of it" in capsys.readouterr().err
    assert (tmp_path / "out/train.jsonl.xz").read_bytes() == before


def test_a_file_that_is_named_twice_is_read_once(tmp_path):
    assert run_import(tmp_path, [log()]) == 0
    file = tmp_path / "out/train.jsonl.xz"
    assert line_files([file, tmp_path / "out/../out/train.jsonl.xz", tmp_path / "out"]) == [file]


def test_a_later_system_message_is_no_part_of_the_goal(tmp_path, capsys):
    told = chat("A shop.", "ring bell", "Ding.")
    told["messages"].insert(3, {"role": "system", "content": "It will ring."})
    assert run_import(tmp_path, [chat("A shop.", "ring bell", "Ding."), told]) == 0
    assert [e.goal for e in read_episodes(tmp_path / "out/train.jsonl.xz")] == ["Ring the bell."]
    assert "dropped: 1, user and assistant do not alternate: system at turn 3" in capsys.readouterr().out


def test_import_into_a_world_with_tasks_of_its_own_asks_for_one(tmp_path, capsys):
    assert run_import(tmp_path, [log()], "--env", "alfworld") == 2
    assert "logs.jsonl: line 1: task: must belong to a family of 'alfworld', got 'alfworld'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "fault"), [(("--dev", "0.6", "--test", "0.4"), "sum below 1"), (("--dev", "-0.1"), "--dev")]
)
def test_import_of_wrong_shares_is_refused(tmp_path, capsys, options, fault):
    assert run_import(tmp_path, [log()], *options) == 2
    assert fault in capsys.readouterr().err
