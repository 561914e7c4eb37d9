"""Token shards of a toy world, and a configuration that trains on them in seconds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer

from data_prep.tokenize import TOKENIZER_FILE, LineEncoder, encode_episode
from loopwm.records.episodes import Episode, Step
from loopwm.records.shards import write_shards
from loopwm.text.model.tokenizer import tokenizer_hash


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads add in an order of their own, which differs between processes in the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def toy_episode(number: int) -> Episode:
    """An agent walks between rooms; a thermometer counts up. Every step earns 2 points, the last one ends it."""
    rng = random.Random(number)
    steps, room = [], "kitchen"
    length = rng.randint(6, 14)
    for i in range(length):
        action = None if i == 0 else rng.choice(["go to hall", "go to kitchen", "read thermometer"])
        room = action.removeprefix("go to ") if action and action.startswith("go to") else room
        text = f"The thermometer reads {i} degrees." if action == "read thermometer" else f"You are in the {room}."
        steps.append(Step(action, text, 2.0 * i, i == length - 1, f"This room is called the {room}.", "an orange"))
    return Episode("scienceworld", "toy", number, "train", "random", "walk about", tuple(steps))


TOY_CONFIG: dict[str, Any] = {
    "system": "text",
    "model": {"preset": "tiny"},
    "data": {"trunk_tokens_min": 64, "trunk_tokens_max": 256},
    "batch": {"rows": 6, "tokens": 512, "micro_batches": 2},
    "optimizer": {"warmup_steps": 3},
    "run": {
        "steps": 12,
        "mixed_precision": "no",
        "log_every": 1,
        "eval_every": 6,
        "eval_batches": 2,
        "save_every": 3,
    },
}
"""All but the shards."""


def write_toy_shards(out: Path, episodes: Iterable[Episode] | None = None) -> None:
    """Of 40 toy episodes, or of others."""
    encoder = LineEncoder(Tokenizer.from_file(str(TOKENIZER_FILE)))
    chosen = map(toy_episode, range(40)) if episodes is None else episodes
    write_shards(out, (encode_episode(encoder, episode) for episode in chosen), 2000, tokenizer_hash(), [], {})


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    write_toy_shards(out)
    return out


@pytest.fixture(scope="session")
def toy_dev(tmp_path_factory) -> Path:
    """Of two policies, whose rows are evaluated apart: of two processes each may see one alone."""
    out = tmp_path_factory.mktemp("dev")
    policies = {40: "gold", 41: "gold"} | dict.fromkeys(range(42, 56), "random")
    write_toy_shards(out, (replace(toy_episode(number), policy=policy) for number, policy in policies.items()))
    return out


@pytest.fixture(scope="session")
def config_file(shards, toy_dev, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "toy.yaml"
    data = TOY_CONFIG["data"] | {"train": [str(shards)], "dev": [str(toy_dev)]}
    path.write_text(yaml.safe_dump(TOY_CONFIG | {"data": data}))
    return path
