"""examples/minimal.py computes what the library computes."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loopwm.core.depth import DepthPlan
from loopwm.core.exit_rules import Gate
from loopwm.records.template import Context
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.tree import START, Branch, RowPlan, TreeRow
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.loss import TextObjective
from loopwm.text.world import WorldModel
from tests.fixtures.models import random_model, save_checkpoint
from tests.fixtures.rows import episode_of_texts, row_builder

ROOT = Path(__file__).parents[2]
STEPS, ROWS, SEED = 100, 3, 3


def load_minimal():
    spec = importlib.util.spec_from_file_location("minimal", ROOT / "examples/minimal.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["minimal"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


minimal = load_minimal()


@pytest.fixture(scope="module")
def marks():
    return minimal.Template(minimal.Tokenizer.from_file(str(minimal.CHECKPOINT / "tokenizer.json")))


@pytest.fixture(scope="module")
def episodes(marks) -> list:
    return list(itertools.islice(minimal.read_episodes(minimal.EPISODES, marks, max_steps=5), 24))


def plans(episodes: list) -> list[tuple[list, list]]:
    """Return the episodes of each step with branches of different starts and depths."""
    out = []
    for step in range(STEPS):
        chosen = [episodes[(step * ROWS + i) % len(episodes)] for i in range(ROWS)]
        out.append((chosen, [[(0, 2 + (step + i) % 3), (1 + i % 2, 2)] for i in range(ROWS)]))
    return out


def library_batch(tokenizer, slots, chosen: list, branches: list) -> TreeBatch:
    builder, rows = row_builder(tokenizer, slots), []
    for episode, pairs in zip(chosen, branches, strict=True):
        nothing = [None] * len(episode.actions)
        tokens = episode_of_texts(episode.goal, episode.observations, episode.actions, nothing, nothing)
        leaves = tuple(Branch(step, (depth,)) for step, depth in pairs)
        rows.append(builder.build(tokens, RowPlan(0, "observed", 1, len(episode.actions) - 1, leaves, 1)))
    batch = TreeBatch.collate(rows, range(len(rows)), pad_id=0)
    place = torch.stack([minimal_places(row)[places] for row, places in zip(rows, batch.place, strict=True)])
    return replace(batch, place=place)


def minimal_places(row: TreeRow) -> Tensor:
    """Return the index of each token in minimal's row, which has no slots of h_0 before a branch.

    Noise is drawn by this index, so both draw the same.
    """
    return (torch.tensor([decode != START for decode in row.decode]).long().cumsum(0) - 1).clamp(min=0)


def model_pair() -> tuple[LoopWMForCausalLM, torch.nn.Module]:
    library = random_model(num_key_value_heads=1, exit_gate=True)
    config = {name: getattr(library.config, name) for name in minimal.Config.__dataclass_fields__}
    model = minimal.LoopWM(minimal.Config(**config))
    minimal.load_weights(model, library.state_dict())
    return library, model


def library_losses(model: LoopWMForCausalLM, batches: list[TreeBatch]) -> Iterator[Tensor]:
    objective, c = TextObjective(model), model.config
    for step, batch in enumerate(batches):
        plan = DepthPlan.sample(SEED, step, batch.row_ids, c.mu_rec, c.max_loops, batch.place)
        yield objective(batch, plan, batch.targets)[0]


def minimal_batches(chosen_and_branches: list, marks) -> Iterator:
    for chosen, branches in chosen_and_branches:
        rows = [minimal.make_row(*row, marks) for row in zip(chosen, branches, strict=True)]
        yield minimal.collate(rows, marks.pad)


@pytest.mark.slow
def test_minimal_loss_equals_library_for_100_steps(tokenizer, episodes, marks):
    library, model = model_pair()
    rows = plans(episodes)
    batches = [library_batch(tokenizer, library.config.slots, *row) for row in rows]
    expected = list(minimal.train(list(library.parameters()), library_losses(library, batches), 1e-3))
    losses = minimal.observation_losses(model, minimal_batches(rows, marks), SEED)
    found = list(minimal.train(list(model.parameters()), losses, 1e-3))
    assert len(found) == STEPS
    assert found[-1] < 0.7 * found[0]
    assert found == pytest.approx(expected, abs=1e-5)


def imagined_texts(folder: Path, threshold: float | None) -> tuple[str, str]:
    """Return the last observation of the plan by minimal and by the library, in at most 4 loops."""
    depth = 4 if threshold is None else Gate(threshold, 4)
    library = WorldModel.from_pretrained(folder)
    expected = library.encode([Context(minimal.GOAL, minimal.HALLWAY)], depth)
    for action in minimal.PLAN:
        expected = library.advance(expected, [action])
    world = minimal.World(*minimal.load_checkpoint(folder), 4, threshold)
    world.encode(minimal.GOAL, minimal.HALLWAY)
    for action in minimal.PLAN:
        world.advance(action)
    return world.decode(), library.decode(expected, greedy=True)[0]


def test_minimal_imagines_what_the_library_imagines():
    own, expected = imagined_texts(minimal.CHECKPOINT, None)
    assert own == expected != ""


def test_minimal_imagines_what_the_library_imagines_with_a_gate(tmp_path):
    model = LoopWMForCausalLM.from_pretrained(minimal.CHECKPOINT, exit_gate=True)
    torch.nn.init.normal_(model.model.core.gate.linear.weight, std=0.01, generator=torch.Generator().manual_seed(0))
    own, expected = imagined_texts(save_checkpoint(tmp_path, model), 0.5)
    assert own == expected != ""


def test_minimal_normalises_the_state_and_leaves_the_loop_as_the_library(tmp_path):
    model = random_model(num_key_value_heads=1, exit_gate=True, state_norm=True)
    torch.nn.init.normal_(model.model.core.gate.linear.weight, std=0.1)
    own, expected = imagined_texts(save_checkpoint(tmp_path, model), 0.5)
    assert own
    assert expected.startswith(own)  # no end mark: each is cut at its own length


def test_minimal_is_at_most_600_lines():
    assert len((ROOT / "examples/minimal.py").read_text(encoding="utf-8").splitlines()) <= 600
