"""Hand-made windows and files of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwm.records.windows import Window
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer

MakeWindow = Callable[..., Window]
WriteSuite = Callable[..., Path]


@pytest.fixture(scope="session")
def make_window() -> MakeWindow:
    """A valid window with five steps; keyword arguments replace fields. `history` may be (action, text) pairs."""

    def make(name: str = "w", history: Sequence[tuple[str | None, str]] | None = None, **fields: Any) -> Window:
        steps = history or [(None, "This room is called the kitchen."), ("open fridge", "The fridge is now open.")]
        window: dict[str, Any] = {
            "id": name, "env": "scienceworld", "task": "boil", "variation": None, "family": "Boil", "split": "dev",
            "goal": "Your task is to boil water.",
            "history": [{"action": action, "observation": text} for action, text in steps],
            "look": "This room is called the kitchen. In it, you see: a stove.",
            "inventory": "In your inventory, you see: a red apple.", "hidden_state": None,
            "hidden_state_start": None,
            "actions": ["go to hallway", "open door", "look around", "wait1", "go to kitchen"],
            "observations": ["You move to the hallway.", "The door is now open.", "You see a table.", "You wait.",
                             "You move to the kitchen."],
            "rewards": [0, 0, 0.5, 0, 0], "dones": [False] * 5,
        }  # fmt: skip
        return {**window, **fields}  # type: ignore[typeddict-item, return-value]

    return make


def episode(
    *pairs: tuple[str, str], policy: str = "gold", split: str = "train", env: str = "scienceworld", goal: str = ""
) -> str:
    """A line of an episode file: its (action, observation) pairs after the first observation."""
    shown = [(None, "Start."), *pairs]
    steps = [{"action": action, "observation": text, "score": 0, "done": False} for action, text in shown]
    played = {"env": env, "task": "walk", "variation": 0, "split": split, "policy": policy, "goal": goal}
    return json.dumps({**played, "steps": steps}) + "\n"


@pytest.fixture
def write_suite(tmp_path: Path) -> WriteSuite:
    def write(windows: Sequence[Any], name: str = "suite.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(window) + "\n" for window in windows))
        return path

    return write


@pytest.fixture
def suite_path(make_window: MakeWindow, write_suite: WriteSuite) -> Path:
    """Forty windows of three families with histories of different lengths."""
    windows = []
    for i in range(40):
        history = [(None, "Start."), *(("look at plane", f"a block {10 + 5 * n}% down") for n in range(i % 7))]
        windows.append(make_window(f"w{i}", history, family=("Boil", "Melt", "Find")[i % 3]))
    return write_suite(windows)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose loops and layers all do something."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = load_tokenizer()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LoopWMForCausalLM(LoopWMConfig(vocab_size=len(tokenizer), **PRESETS["tiny"]))
        for name, weight in model.named_parameters():
            if "injection" not in name:
                weight.add_(0.15 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
