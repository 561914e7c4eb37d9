"""Selective state spaces against their equations, number by number."""

from __future__ import annotations

import math

import torch

from lab.pixels.mamba import FASTEST, SLOWEST, STATE, TAPS, MambaLayer


def silu(x):
    return x / (1 + math.exp(-x))


@torch.no_grad()
def test_a_layer_is_its_equations():
    """Mamba, section 3: algorithm 2 with the discretisation of equation 4, on plain numbers."""
    torch.manual_seed(0)
    dim, inner, steps = 3, 6, 6
    layer, x = MambaLayer(dim), torch.randn(1, steps, dim)
    layer.tap_bias.normal_()
    layer.skip.normal_()
    begins = 2  # an episode begins within
    age = torch.tensor([[TAPS, TAPS + 1, 0, 1, 2, 3]])
    out, _ = layer(x, age, torch.zeros(1, TAPS - 1 + STATE, inner))
    both = [layer.inwards(layer.norm(x[0, t])).tolist() for t in range(steps)]
    inputs, gates = [row[:inner] for row in both], [row[inner:] for row in both]
    s = [[0.0] * STATE for _ in range(inner)]
    for t in range(steps):
        earliest = begins if t >= begins else 0
        u = []
        for e in range(inner):
            lags = range(min(TAPS, t - earliest + 1))
            u.append(
                silu(sum(layer.taps[lag, e].item() * inputs[t - lag][e] for lag in lags) + layer.tap_bias[e].item())
            )
        low, b, c = torch.tensor(u).matmul(layer.read.weight.T).split((layer.rank, STATE, STATE))
        y = []
        for e in range(inner):
            delta = math.log1p(math.exp(float(layer.delta.weight[e] @ low + layer.delta.bias[e])))
            for n in range(STATE):
                kept = 0.0 if t == begins else math.exp(-delta * math.exp(layer.log_a[e, n].item()))
                s[e][n] = kept * s[e][n] + delta * b[n].item() * u[e]
            total = sum(s[e][n] * c[n].item() for n in range(STATE)) + layer.skip[e].item() * u[e]
            y.append(total * silu(gates[t][e]))
        expected = x[0, t] + layer.outwards(torch.tensor(y))
        torch.testing.assert_close(out[0, t], expected, rtol=1e-4, atol=1e-5)


def test_time_steps_begin_between_the_slowest_and_the_fastest():
    torch.manual_seed(0)
    layer = MambaLayer(64)
    begun = torch.nn.functional.softplus(layer.delta.bias)
    assert begun.min() >= SLOWEST * 0.999
    assert begun.max() <= FASTEST * 1.001
    assert begun.max() > 20 * begun.min()
    assert torch.allclose(-layer.log_a.exp()[0], -torch.arange(1.0, STATE + 1))
