"""Targets that nothing a row shows determines: which they are, what they weigh and how they are reported."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerFast

from loopwm.records.episodes import Episode, Step
from loopwm.records.template import ContextKind
from loopwm.records.token_episode import LOOK
from loopwm.text.data.data_loader import LoaderState
from loopwm.text.data.tree import IGNORED, TreeRow
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.config import load_config
from loopwm.text.training.loss import observation_loss
from loopwm.text.training.program import TextProgram
from loopwm.trainer.trainer import Trainer
from tests.fixtures.shards import TOY_CONFIG, write_toy_shards
from tests.training.consequences.watched import loss_of, program_of, shows

PLACES = [f"{kind} {i}" for kind in ("desk", "shelf") for i in (1, 2, 3)]


def game(number: int) -> Episode:
    """Walks between places and carries things; what it shows of them is all there is to see."""
    rng = random.Random(number)
    contents = {place: [f"pen {10 * i + j}" for j in range(rng.randint(0, 3))] for i, place in enumerate(PLACES, 1)}
    steps, at, held = [Step(None, "You are in a room.", 0, False, "You are in a room.", "", None)], "", ""
    for _ in range(rng.randint(10, 30)):
        if held and rng.random() < 0.5:
            action, answer = f"move {held} to {at}", f"You move the {held} to the {at}."
            contents[at].append(held)
            held = ""
        elif not held and at and contents[at] and rng.random() < 0.5:
            held = contents[at].pop()
            action, answer = f"take {held} from {at}", f"You pick up the {held} from the {at}."
        else:
            at = rng.choice(PLACES)
            action, answer = f"go to {at}", f"You arrive at {at}. {view(at, contents)}"
        look = f"You are facing the {at}. {view(at, contents)}" if at else "You are in a room."
        steps.append(Step(action, answer, 0, False, look, held, "all of it"))
    return Episode("alfworld", "pick", f"game-{number}", "train", "expert", "carry", tuple(steps), "all of it")


def view(place: str, contents: dict[str, list[str]]) -> str:
    return f"On the {place}, you see {', '.join(f'a {thing}' for thing in contents[place]) or 'nothing'}."


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("games")
    write_toy_shards(out, map(game, range(12)))
    return out


@pytest.fixture(scope="module")
def games_config(games: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "games.yaml"
    data = TOY_CONFIG["data"] | {"train": [str(games)], "dev": [str(games)]}
    path.write_text(yaml.safe_dump(TOY_CONFIG | {"data": data}))
    return path


def expected(shown: list[str], observation: str) -> str:
    """Return the part of an observation that nothing shown determines, by reading all of it again."""
    place = observation.partition("On the ")[2].partition(",")[0]
    if not place or any(f"On the {place}, you see" in text for text in shown):
        return ""
    return observation.partition("you see ")[2]


def undetermined_text(row: TreeRow, wanted: Sequence[bool], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return of each observation among the wanted positions the targets that are undetermined, as text."""
    texts, before = [], False
    for label, unknown, is_wanted in zip(row.label, row.undetermined, wanted, strict=True):
        target = is_wanted and label != IGNORED
        if target and not before:
            texts.append([])
        if target and unknown:
            texts[-1].append(label)
        before = target
    return [tokenizer.decode(tokens).removeprefix(", you see ") for tokens in texts]


@pytest.mark.parametrize("context_kind", ["observed", "snapshot", "briefed", "full"])
def test_undetermined_targets_are_those_of_a_slow_reading(games_config: Path, context_kind: ContextKind) -> None:
    """Of trunks and branches, whose own observations are not shown; a hidden state tells everything."""
    tokenizer, found, queries = load_tokenizer(), Counter[bool](), 0
    data = ["data.trunk_tokens_max=150", "data.query_share=0.2", "data.max_queries=6"]
    program = program_of(games_config, f"data.regimes={{{context_kind}: 1.0}}", *data)
    for rows, _ in islice(program.train_stream.steps(LoaderState()), 8):
        for planned in rows:
            episode, plan, row = planned.episode, planned.plan, planned.row
            observations = [tokenizer.decode(text) for text in episode.observations]
            look = [tokenizer.decode(episode.text(LOOK, plan.head))] if context_kind == "snapshot" else []

            def wanted(text: str, last_shown: int) -> str:
                shown = [*look, observations[plan.head], *observations[plan.first : last_shown + 1]]  # noqa: B023
                return "" if context_kind in ("briefed", "full") else expected(shown, text)

            trunk = undetermined_text(row, [branch == 0 for branch in row.branch], tokenizer)
            steps = range(plan.targets_from, plan.last + 1)
            assert trunk == [wanted(observations[step], step - 1) for step in steps]
            for number, branch in enumerate(plan.branches, start=1):
                decoded = [observations[branch.step + k] for k in branch.decoded if branch.query is None]
                if branch.query is not None:
                    asked = episode.queries_at(branch.step + branch.deepest - 1)[branch.query]
                    decoded = [tokenizer.decode(asked[1])]
                    queries += 1
                deferred = undetermined_text(row, [b == number for b in row.branch], tokenizer)
                assert deferred == [wanted(text, branch.step) for text in decoded]
                found.update(bool(text) for text in deferred)
            found.update(bool(text) for text in trunk)
    assert min(found[False], queries) > 20
    assert (found[True] > 20) == (context_kind in ("observed", "snapshot"))


@shows("objective.undetermined_weight")
def test_undetermined_targets_count_as_often_as_the_configuration_says(games_config: Path) -> None:
    _, _, plain = loss_of(games_config, [])
    _, _, lighter = loss_of(games_config, ["objective.undetermined_weight=0.25"])
    assert 0 < plain.undetermined.sum() < plain.targets
    assert plain.weight.eq(1.0).all()
    assert lighter.weight.equal(torch.where(plain.undetermined, 0.25, 1.0))
    bags = lighter.trunk_steps.observation_weight
    assert set(bags.unique().tolist()) == {0.0, 0.25, 1.0}


def test_observation_loss_reports_answerable_observations() -> None:
    """Three observations of two tokens; the second has an undetermined target, the third a wrong one."""
    loss = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    right, starts = torch.tensor([1, 1, 1, 1, 1, 0]).bool(), torch.tensor([1, 0, 1, 0, 1, 0]).bool()
    undetermined, horizon = torch.tensor([0, 0, 0, 1, 0, 0]).bool(), torch.tensor([0, 0, 0, 0, 2, 2])
    _, sums = observation_loss(loss, torch.ones(6), right, horizon, starts, undetermined, 1.0)
    assert [sums[name][0].item() for name in ("observations", "exact", "answerable", "answerable_exact")] == [
        2,
        2,
        1,
        1,
    ]
    assert [sums[name][2].item() for name in ("observations", "exact", "answerable", "answerable_exact")] == [
        1,
        0,
        1,
        0,
    ]
    assert (sums["undetermined"].sum().item(), sums["undetermined_loss"].sum().item()) == (1, 8)


def test_dev_reports_answerable_exactness_by_group_and_their_mean(games: Path, games_config: Path, tmp_path) -> None:
    write_toy_shards(tmp_path / "noisy", (replace(game(i), policy="noisy-expert") for i in range(20, 26)))
    trainer = Trainer(
        load_config(games_config, [f"data.dev=[{games}, {tmp_path / 'noisy'}]"]), TextProgram, tmp_path / "r"
    )
    trainer.program.objective.double()
    record = trainer.evaluate()
    shares = []
    for group in ("alfworld/expert", "alfworld/noisy-expert"):
        counts = {k: record[f"answerable_k{k}/{group}"] for k in range(6) if f"answerable_k{k}/{group}" in record}
        assert all(count < record[f"observations_k{k}/{group}"] for k, count in counts.items() if k == 0)
        exact = sum(count * record[f"answerable_exact_k{k}/{group}"] for k, count in counts.items())
        shares.append(exact / sum(counts.values()))
    assert record["dev_answerable"] == pytest.approx(sum(shares) / 2)
    parts = record["undetermined_share"] * record["loss_undetermined"]
    parts += (1 - record["undetermined_share"]) * record["loss_determined"]
    assert record["loss"] == pytest.approx(parts, rel=1e-4)
