from __future__ import annotations

import math

import pytest
import torch

from loopwm.core.gate_loss import (
    continue_labels,
    continue_loss,
    exit_log_distribution,
    expected_exit_loss,
    gate_entropy_loss,
)
from loopwm.core.halting import ExitGate

NAN = math.nan


def random_logits(rows: int, loops: int) -> torch.Tensor:
    """Rows that run all loops, or only the last of them."""
    logits = 3 * torch.randn(rows, loops, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row in range(rows):
        logits[row, : row % loops] = NAN
    return logits


def test_the_exit_distribution_sums_to_one_and_is_the_product_of_the_formula():
    logits = random_logits(40, 5)
    p = exit_log_distribution(logits).exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(40, dtype=torch.float64))
    for row in range(40):
        expected, stay = [], 1.0
        for z in logits[row].tolist():
            g = 0.0 if math.isnan(z) else 1 / (1 + math.exp(-z))
            expected.append(g * stay)
            stay *= 1 - g
        assert p[row].tolist() == pytest.approx([x / sum(expected) for x in expected], abs=1e-12)


def test_the_exit_distribution_stays_finite_for_gates_that_are_as_good_as_shut_or_open():
    for z in (-200.0, 200.0):
        p = exit_log_distribution(torch.full((1, 3), z)).exp()
        assert p.sum().item() == pytest.approx(1)


def test_losses_and_gradients_stay_finite_beside_loops_that_did_not_run():
    logits = random_logits(6, 3).requires_grad_()
    losses = torch.rand(6, 3, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        losses[logits.isnan()] = NAN
    total = expected_exit_loss(logits, losses, 0.1)[0] + gate_entropy_loss(logits, 0.1)[0]
    gradients = torch.autograd.grad(total, (logits, losses))
    assert total.isfinite()
    for gradient in gradients:
        assert gradient[~logits.isnan()].isfinite().all()
        assert gradient[~logits.isnan()].abs().max() > 0


def test_the_expected_loss_weighs_each_exit_by_its_probability():
    logits = torch.tensor([[0.0, 0.0, 50.0], [NAN, 0.0, 50.0]], dtype=torch.float64)
    losses = torch.tensor([[4.0, 2.0, 1.0], [NAN, 3.0, 1.0]], dtype=torch.float64)
    loss, diagnostics = expected_exit_loss(logits, losses, 0.5)
    expected = ((4 / 2 + 2 / 4 + 1 / 4) + (3 / 2 + 1 / 2)) / 2
    entropy = (1.5 * math.log(2) + math.log(2)) / 2
    assert diagnostics["expected_loss"].tolist() == pytest.approx([2 * expected, 2])
    assert diagnostics["exit_entropy"].tolist() == pytest.approx([2 * entropy, 2])
    assert loss.item() == pytest.approx(2 * (expected - 0.5 * entropy))


def test_the_regulariser_is_the_summed_binary_entropy_of_the_loops_that_ran():
    logits = random_logits(12, 4)
    total = 0.0
    for z in logits.flatten().tolist():
        if not math.isnan(z):
            g = 1 / (1 + math.exp(-z))
            total -= g * math.log(g) + (1 - g) * math.log(1 - g)
    assert gate_entropy_loss(logits, 0.3)[0].item() == pytest.approx(-0.3 * total)


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


def test_the_regulariser_alone_drives_every_gate_to_one_half():
    gates = fitted(lambda logits, losses: gate_entropy_loss(logits, 0.05)[0])
    assert (gates - 0.5).abs().max() < 0.02


def test_the_second_stage_tells_rows_that_gain_by_looping_from_rows_that_do_not():
    gates = fitted(lambda logits, losses: continue_loss(logits, losses)[0])
    hard = toy_states(200, 4)[0][:, 0, 0] > 0
    later = gates[:, 2:]  # easy rows gain by their second loop
    assert later[hard].max() < 0.2
    # A loop without gain is labelled sigmoid(-0.25), not zero.
    assert later[~hard].mean().item() == pytest.approx(1 / (1 + math.exp(-0.25)), abs=0.05)
    assert (gates - 0.5).abs().mean() > 0.2


def test_the_expected_loss_makes_hard_rows_stay_longer_and_only_its_entropy_keeps_exits_open():
    hard = toy_states(200, 4)[0][:, 0, 0] > 0
    mean_exit, entropy = {}, {}
    for alpha in (0.0, 0.3):
        gates = fitted(lambda logits, losses, alpha=alpha: expected_exit_loss(logits, losses, alpha)[0])
        p = exit_log_distribution(gates.logit()).exp()
        mean_exit[alpha] = (p * torch.arange(1, 5)).sum(-1)
        entropy[alpha] = -(p * p.log()).sum(-1).mean().item()
    assert mean_exit[0.3][hard].mean() > mean_exit[0.3][~hard].mean() + 0.5
    assert entropy[0.0] < 0.5 * entropy[0.3]
