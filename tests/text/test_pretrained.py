"""The checkpoint that ships: its loops earn their keep, and its folder holds what it promises."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import loopwm
from loopwm.records import template
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.tree import IGNORED, Branch, RowBuilder, RowPlan, TreeRow
from loopwm.text.model.chat_template import chat_template
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.training.program import template_ids
from tests.fixtures.rows import episode_of_texts

PRETRAINED = Path(loopwm.__file__).parent / "pretrained"
WINDOWS = Path(__file__).parents[1] / "data" / "dev-100.jsonl.gz"


@pytest.fixture(scope="module")
def shipped():
    return load_checkpoint(PRETRAINED)


def row(builder: RowBuilder, tokenizer, window: dict) -> TreeRow:
    """A snapshot of the window's now and its deferred actions, with the observation after each as a target."""

    def ids(text: str) -> list[int]:
        return tokenizer(template.clean(text), add_special_tokens=False)["input_ids"]

    steps = len(window["actions"])
    episode = episode_of_texts(
        goal=ids(window["goal"]),
        observations=[ids(text) for text in (window["history"][-1]["observation"], *window["observations"])],
        actions=[[], *map(ids, window["actions"])],
        looks=[ids(window["look"])] + [None] * steps,
        inventories=[ids(window["inventory"])] + [None] * steps,
    )
    return builder.build(episode, RowPlan(0, "snapshot", 1, 0, (Branch(0, tuple(range(1, steps + 1))),), None))


@torch.inference_mode()
def losses(model, batch: TreeBatch, depth: int) -> torch.Tensor:
    """Nats of all target observations of each row."""
    out = model.model(
        batch.tokens, batch.attention_mask(), position_ids=batch.positions, use_cache=False, depth=depth
    )  # fmt: skip
    wanted = batch.label != IGNORED
    logits = model.lm_head(out.last_hidden_state[wanted])
    nats = torch.nn.functional.cross_entropy(logits, batch.label[wanted], reduction="none")
    return torch.zeros(len(batch.tokens)).index_add(0, wanted.nonzero()[:, 0], nats)


@pytest.mark.slow
def test_what_followed_is_likelier_than_what_followed_elsewhere_in_40_held_out_windows(shipped):
    """Over all horizons of the windows, each beside the answers of the next window to its own context and actions."""
    model, tokenizer = shipped
    with gzip.open(WINDOWS, "rt", encoding="utf-8") as lines:
        windows = [json.loads(line) for line in islice(lines, 40)]
    assert {window["split"] for window in windows} == {"dev"}
    builder = RowBuilder(template_ids(tokenizer), model.config.slots)
    others = [window | {"observations": other["observations"]} for window, other in pairwise([*windows, windows[0]])]

    def nats(of: list[dict[str, Any]]) -> torch.Tensor:
        rows = [row(builder, tokenizer, window) for window in of]
        batches = [
            TreeBatch.collate(rows[i : i + 10], range(10), tokenizer.pad_token_id) for i in range(0, len(rows), 10)
        ]
        return torch.cat([losses(model, batch, model.config.default_depth) for batch in batches])

    gain = nats(others) - nats(windows)
    print(f"gain {gain.mean():.3f} nats a window, standard error {gain.std() / len(gain) ** 0.5:.3f}")
    assert (gain > 0).float().mean() > 0.9


def test_the_folder_is_small_bfloat16_safetensors_with_a_card():
    weights = list(PRETRAINED.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in weights) <= 24 * 2**20
    assert all(file.stat().st_size <= 8 * 2**20 for file in PRETRAINED.iterdir())
    config = json.loads((PRETRAINED / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "bfloat16"
    assert (PRETRAINED / "README.md").is_file()
    assert not list(PRETRAINED.glob("*.bin"))


def test_the_folder_has_the_chat_template_of_its_slots():
    written = (PRETRAINED / "chat_template.jinja").read_text(encoding="utf-8")
    assert written == chat_template(LoopWMConfig.from_pretrained(PRETRAINED).slots)


def test_the_manuals_example_prints_what_it_shows(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    code, shown = re.search(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", (root / "docs/model.md").read_text(), re.S
    ).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == shown
