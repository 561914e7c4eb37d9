from __future__ import annotations

import math

import pytest
import torch

from lab.studies.gate_loss import continue_labels, continue_loss
from loopwm.core.exit_rules import ExitGate


def test_continue_labels_are_those_of_the_formula():
    labels = continue_labels(torch.tensor([[3.0, 2.0, 2.5, 2.495, 2.4]]))
    gains = (1.0, 0.0, 0.005, 0.095)
    assert labels[0].tolist() == pytest.approx([1 / (1 + math.exp(-50 * (g - 0.005))) for g in gains], abs=1e-4)


def toy_states(rows: int, loops: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States (N, T, 4) and losses (N, T): easy rows gain by one loop, hard rows by every loop. A state tells both."""
    generator = torch.Generator().manual_seed(1)
    hard = torch.rand(rows, generator=generator) < 0.5
    states = 0.1 * torch.randn(rows, loops, 4, generator=generator)
    states[..., 0] += torch.where(hard, 1.0, -1.0)[:, None]
    steps = torch.arange(loops, dtype=torch.float32)
    states[..., 1] += steps == 1
    states[..., 2] += steps
    losses = torch.where(hard[:, None], 3 - 0.4 * steps, torch.tensor([2.0] + [1.0] * (loops - 1)))
    return states, losses


def fitted(objective) -> torch.Tensor:
    """Gates (N, T) on the toy states after minimising the objective from a gate that leans to one side."""
    states, losses = toy_states(200, 4)
    gate = ExitGate(4)
    with torch.no_grad():
        gate.linear.weight.copy_(torch.tensor([[1.5, -2.0, 1.0, 0.5]]))
        gate.linear.bias.fill_(2.0)
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        objective(gate(states), losses).backward()
        optimizer.step()
    return gate(states).detach().sigmoid()


def test_the_second_stage_tells_rows_that_gain_by_looping_from_rows_that_do_not():
    gates = fitted(lambda logits, losses: continue_loss(logits, losses)[0])
    hard = toy_states(200, 4)[0][:, 0, 0] > 0
    later = gates[:, 2:]  # easy rows gain by their second loop
    assert later[hard].max() < 0.2
    # A loop without gain is labelled sigmoid(-0.25), not zero.
    assert later[~hard].mean().item() == pytest.approx(1 / (1 + math.exp(-0.25)), abs=0.05)
    assert (gates - 0.5).abs().mean() > 0.2
