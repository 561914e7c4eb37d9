"""Small made-up episodes and games."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from data_prep import environments
from data_prep.collect import play
from data_prep.environments.base import Environment
from data_prep.plan import CollectionPlan
from data_prep.policies import POLICIES
from loopwm.records.episodes import Episode, Step, write_episodes

from .toy import Toy


def play_once(
    environment: Environment, policy: str, task: str, variation: int | str, split: str, max_steps: int, seed: int = 0
) -> Episode:
    """One episode by a policy, its solution asked of the environment."""
    plan = CollectionPlan(environment.name, split, policy, 1, max_steps, seed, ())
    gold = environment.gold_actions(task, variation) if POLICIES[policy].needs_gold else []
    return play(environment, plan, task, variation, gold, Random(seed))


def as_answered(episode: Episode) -> tuple[Step, ...]:
    """The steps as a simulator returns them, before hidden states are added to some."""
    return tuple(replace(step, hidden_state=None) for step in episode.steps)


def check_that_kills_change_nothing(options: list[str], folder: Path, seed: int) -> None:
    """Collects undisturbed, and again with kills at random moments of that time; compares the files."""
    command = [sys.executable, "-m", "data_prep", "collect", *options, "--out"]
    whole, killed = folder / "whole", folder / "killed"
    started = time.monotonic()
    subprocess.run([*command, str(whole)], check=True, capture_output=True)
    took, rng, kills = time.monotonic() - started, Random(seed), 0
    while kills < 2:
        process = subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=rng.uniform(0.3, 0.9) * took)
            took /= 2  # the machine is less busy than it was: from the beginning, and sooner
            shutil.rmtree(killed)
        except subprocess.TimeoutExpired:
            kills += 1
        process.kill()
        process.wait()
    subprocess.run([*command, str(killed)], check=True, capture_output=True)
    assert contents(killed) == contents(whole)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, but what a kill left half-written."""
    return {path.name: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}


def make_episode(task: str = "boil", variation: int | str = 0, length: int = 8, **changes: object) -> Episode:
    """An episode whose texts tell task, variation and step apart, but whose look repeats."""
    label = f"{task} {variation}"
    steps = [Step(None, f"{label} begins", 0, False, f"look {label}\n", "nothing")]
    for i in range(1, length + 1):
        steps.append(Step(f"do {i}", f"{label} did {i}", 10 * i, i == length, f"look {label}\n", f"holding {i // 3}"))
    fields: dict[str, object] = {"split": "train", "policy": "gold", "goal": f"goal of {label}", **changes}
    return Episode("scienceworld", task, variation, steps=tuple(steps), **fields)  # type: ignore[arg-type]


@pytest.fixture
def episode_file(tmp_path: Path) -> Path:
    """Six train episodes of two tasks."""
    path = tmp_path / "episodes.jsonl.xz"
    write_episodes(path, [make_episode(task, v) for task in ("boil", "melt") for v in range(3)])
    return path


@pytest.fixture
def alfworld_games(tmp_path: Path) -> Path:
    """Games in ALFWorld's layout: one to train on, one that training must not see."""
    for split, thing in (("valid_train", "Spoon"), ("valid_seen", "Xylophone")):
        folder = tmp_path / "json_2.1.1" / split / f"pick-{thing}" / "trial"
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps(_game(thing)))
        (folder / "traj_data.json").write_text(
            json.dumps({"turk_annotations": {"anns": [{"task_desc": f"Get {thing} from bed 2"}]}})
        )
    return tmp_path / "json_2.1.1"


def _game(thing: str) -> dict[str, str]:
    rules = {
        "task": ["Your task is to: put a thing in drawer."],
        "GotoLocation.feedback": ["You arrive at {r.name}. #examineReceptacle.feedback#"],
        "OpenObject.feedback": ["You open the {r.name}. #examineReceptacle.feedback#"],
        "CloseObject.feedback": ["You close the {r.name}."],
        "examineReceptacle.feedback": [
            "The {r.name} is open. In it, you see [{o.name}].",
            "The {r.name} is closed.",
            "On the {r.name}, you see [{o.name}].",
        ],
        **{
            f"{name}.feedback": [f"You {name} the {{o.name}}."]
            for name in (
                "PickupObject",
                "PutObject",
                "toggleObject",
                "heatObject",
                "cleanObject",
                "coolObject",
                "examineObject",
            )
        },
    }
    grammar = ",\n".join(
        f'"{name}": [\n' + ",\n".join(f'{{ "rhs": {json.dumps(rhs)} }}' for rhs in sentences) + "\n]"
        for name, sentences in rules.items()
    )
    facts = "(receptacleType D_1 DrawerType) (openable D_1) (inReceptacle T_1 D_1)"
    return {
        "pddl_problem": f"(:init {facts} (objectType T_1 {thing}Type))",
        "grammar": grammar + '\ntemplate :: "take {o} from {r}";',
    }


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "broke_before", False)
    monkeypatch.setattr(Toy, "solved", [])
    monkeypatch.setitem(environments.ENVIRONMENTS, "toy", Toy)
