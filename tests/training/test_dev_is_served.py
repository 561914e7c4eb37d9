"""What a run measures on dev is what the service computes on the same windows: teacher forcing over a row with its tree
mask, against encoding, advancing and stepping the decoder, one world at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pytest
import torch

from loopwm.records.template import Context, Transition
from loopwm.records.token_episode import INVENTORY, LOOK
from loopwm.text.data.data_loader import LoaderState, PlannedRow
from loopwm.text.data.tree import TRUNK_HORIZON
from loopwm.text.decoding import Decoder
from loopwm.text.drafts import Lookup, SharedText
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.config import TrainingConfig, load_config
from loopwm.text.training.program import TextProgram
from loopwm.text.world import World, WorldModel
from loopwm.trainer.trainer import Trainer

SETTINGS = [
    "model.overrides={state_slots: 2, mu_rec: 4.0, default_depth: 3}",
    "data.trunk_tokens_max=140",
    "data.max_branches=2",
    "batch={rows: 5, tokens: 64, micro_batches: 2}",
    "run.eval_batches=2",
    "run.seed=1",
]


def moved_program(config: TrainingConfig) -> TextProgram:
    """One whose layers all do something: fresh output projections are zero."""
    program = TextProgram(config)
    with torch.no_grad():
        for name, weight in program.objective.named_parameters():
            if "injection" not in name:
                weight.add_(0.15 * torch.randn_like(weight))
    return program


@dataclass(frozen=True)
class Asked:
    """An observation that some row teaches, as it would be asked for."""

    horizon: int
    context: Context
    actions: list[str]
    observation: list[int]


def asked_of(planned: PlannedRow, text) -> Iterator[Asked]:
    """Everything a row teaches: the steps of its trunk that are targets, and the decoded horizons of its branches."""
    episode, plan = planned.episode, planned.plan

    def asked(now: int, count: int, horizon: int) -> Asked:
        seen = tuple(
            Transition(text(episode.actions[i]), text(episode.observations[i])) for i in range(plan.first, now + 1)
        )
        shown = {}
        if plan.context_kind == "snapshot":
            shown = {"look": text(episode.text(LOOK, plan.head)), "inventory": text(episode.text(INVENTORY, plan.head))}
        context = Context(text(episode.goal), text(episode.observations[plan.head]), seen, **shown)
        actions = [text(episode.actions[now + i]) for i in range(1, count + 1)]
        return Asked(horizon, context, actions, list(map(int, episode.observations[now + count])))

    for step in range(plan.targets_from, plan.last + 1):
        yield asked(step - 1, 1, TRUNK_HORIZON)
    for branch in plan.branches:
        for k in branch.decoded:
            yield asked(branch.step, k, k)


def stepped(model: LoopWMForCausalLM, worlds: WorldModel, world: World, targets: list[int]) -> torch.Tensor:
    """Logits (N, V) of the decoder, token by token, which is made to write `targets`."""
    found: list[torch.Tensor] = []

    def write(_, __, logits: torch.Tensor) -> torch.Tensor:
        found.append(logits[0, 0].clone())
        return torch.nn.functional.one_hot(torch.tensor([[targets[len(found) - 1]]]), logits.shape[-1]).float()

    hook = model.lm_head.register_forward_hook(write)
    forward = partial(worlds._next_tokens, world.depth)
    decoder = Decoder(forward, worlds._obs, worlds._end, len(targets), drafts=False)
    with torch.inference_mode():
        decoder.greedy([worlds.before_decoding(world)], [Lookup(SharedText(), "")])
    hook.remove()
    return torch.stack(found)


def test_losses_and_greedy_tokens_on_dev_are_those_of_encoding_advancing_and_decoding(config_file, tmp_path):
    trainer = Trainer(load_config(config_file, SETTINGS), moved_program, tmp_path)
    measured = trainer.evaluate()
    program = trainer.program
    model, tokenizer = program.objective.model, program.tokenizer
    worlds = WorldModel(model, tokenizer)
    steps = islice(program.dev_stream.steps(LoaderState()), program.config.run.eval_batches)
    rows = [row for planned, _ in steps for row in planned]
    assert {row.plan.context_kind for row in rows} == {"observed", "snapshot"}

    sums: dict[int, torch.Tensor] = {}
    for row in rows:
        for asked in asked_of(row, tokenizer.decode):
            world = worlds.encode([asked.context])
            for action in asked.actions:
                world = worlds.advance(world, [action])
            targets = torch.tensor([*asked.observation, tokenizer.eos_token_id])
            logits = stepped(model, worlds, world, targets.tolist())
            assert len(logits) == len(targets)
            nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            right = (logits.argmax(-1) == targets).float()
            counts = torch.tensor([nats.sum(), right.sum(), len(targets), right.all(), 1.0])
            sums[asked.horizon] = sums.get(asked.horizon, 0) + counts

    assert len(sums) > 2
    assert {f"loss_k{k}" for k in sums} == {name for name in measured if name.startswith("loss_k")}
    for k, (nats, right, count, exact, observations) in sums.items():
        assert measured[f"exact_k{k}"] == pytest.approx((exact / observations).item())
        assert measured[f"observations_k{k}"] == observations
        assert measured[f"loss_k{k}"] == pytest.approx((nats / count).item(), rel=1e-4)
        assert measured[f"token_accuracy_k{k}"] == pytest.approx((right / count).item(), abs=1e-6)
    nats, _, count, *_ = sum(sums.values())
    assert measured["loss"] == pytest.approx((nats / count).item(), rel=1e-4)
    assert measured["mean_depth"] == 3
