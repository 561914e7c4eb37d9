from __future__ import annotations

import dataclasses

import pytest
import torch

from loopwm.core.block import causal_attention, checkpoint_blocks
from loopwm.core.depth import DepthPlan
from loopwm.core.exit_rules import Convergence, Fixed
from loopwm.core.looped import LoopedCore
from tests.core.cores import CONFIG, THETA, random_core, random_input, shared_inputs
from tests.reference import looped as reference

STRUCTURES = [
    CONFIG,
    dataclasses.replace(CONFIG, state_norm=True),
    dataclasses.replace(CONFIG, sandwich_norms=True),
]


@pytest.mark.parametrize("config", STRUCTURES, ids=["plain", "state_norm", "sandwich_norms"])
def test_forward_equals_the_reference_at_every_depth(config):
    core, x = random_core(config), random_input(2, 5)
    for depth in (1, 2, 6):
        out = core(x, shared_inputs(2, 5), causal_attention, depth).h
        for row in range(2):
            h0 = torch.zeros(5, config.dim, dtype=torch.float64)
            expected = reference.row_forward(dict(core.named_parameters()), config, x[row], h0, depth, depth, THETA)
            torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", STRUCTURES, ids=["plain", "state_norm", "sandwich_norms"])
def test_sampled_depth_gives_outputs_and_gradients_of_the_reference_with_the_last_mu_bwd_loops(config):
    """Rows of different depth in one batch: nothing of a row depends on the others, nor on when it joins."""
    core, x = random_core(config), random_input(4, 3)
    plan = DepthPlan(loops=(5, 1, 3, 2), mu_bwd=2, noise_seeds=(1, 2, 3, 4))
    out = core.forward_sampled(x, shared_inputs(4, 3), causal_attention, plan).h
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameters = dict(core.named_parameters())
    gradients = torch.autograd.grad((out * weight).sum(), list(parameters.values()))

    noise = plan.initial_state(3, config.dim, x.device).double()
    rows = [
        reference.row_forward(parameters, config, x[i], noise[i], plan.loops[i], plan.mu_bwd, THETA) for i in range(4)
    ]
    expected = torch.stack(rows)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), list(parameters.values()))
    for name, ours, theirs in zip(parameters, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_state_norm_keeps_the_size_of_the_state():
    core = random_core(dataclasses.replace(CONFIG, state_norm=True))
    torch.nn.init.ones_(core.state_norm.weight)
    for depth in range(1, 7):
        state = core(10 * random_input(2, 5), shared_inputs(2, 5), causal_attention, depth).state
        torch.testing.assert_close(state.square().mean(-1), torch.ones(2, 5, dtype=state.dtype), atol=1e-3, rtol=0)


def test_truncation_changes_gradients_so_the_comparison_above_can_fail():
    core, x = random_core(), random_input(1, 3)
    gradients = []
    for mu_bwd in (1, 4):
        plan = DepthPlan(loops=(4,), mu_bwd=mu_bwd, noise_seeds=(1,))
        out = core.forward_sampled(x, shared_inputs(1, 3), causal_attention, plan).h
        gradients.append(torch.autograd.grad(out.square().sum(), core.injection.a)[0])
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_no_gradient_passes_the_initial_state():
    """The state may be another pass's latent: back-propagation ends at h^(0), however few the loops."""
    core, x = random_core(), random_input(1, 3)
    initial = torch.ones_like(x).requires_grad_()
    plan = DepthPlan(loops=(1,), mu_bwd=1, noise_seeds=(1,))
    core.forward_sampled(x, shared_inputs(1, 3), causal_attention, plan, initial).h.square().sum().backward()
    assert initial.grad is None
    assert core.injection.a.grad.any()


def test_decay_is_exact_where_dt_underflows():
    """dt = softplus(-110) is 0 in float32, and exp(110) infinite; their product is 1."""
    injection = LoopedCore(CONFIG).injection
    with torch.no_grad():
        injection.a.fill_(110)
        injection.b.fill_(-110)
    torch.testing.assert_close(injection.decay(), torch.ones(CONFIG.dim))
    injection.decay().sum().backward()
    torch.testing.assert_close(injection.b.grad, torch.ones(CONFIG.dim))


@pytest.mark.parametrize(("sign_a", "sign_b"), [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_retention_stays_inside_zero_and_one_and_state_bounded_after_a_large_gradient_step(sign_a, sign_b):
    """200 loops stay within the geometric sum |B_bar e| / (1 - A_bar): a fresh block adds nothing to it."""
    core = LoopedCore(dataclasses.replace(CONFIG, max_loops=200))
    x = random_input(1, 4).float()
    core(x, shared_inputs(1, 4), causal_attention, 4).h.square().sum().backward()
    with torch.no_grad():
        for parameter, sign in ((core.injection.a, sign_a), (core.injection.b, sign_b)):
            assert parameter.grad is not None
            assert parameter.grad.abs().min() > 0
            parameter += sign * 1e4 * parameter.grad.abs() / parameter.grad.abs().max()
    retention = core.injection.retention()
    assert ((retention > 0) & (retention < 1)).all()
    out = core(x, shared_inputs(1, 4), causal_attention, 200)
    drive = core.injection.drive(core.input_norm(x)).abs()
    assert drive.isfinite().all()
    assert (out.state.abs() <= 1.001 * drive / (1 - retention)).all()


def test_state_stays_bounded_over_200_loops_with_random_weights():
    """The pre-norm residuals add a bounded amount to each loop, and the retention forgets it geometrically."""
    core = random_core(dataclasses.replace(CONFIG, max_loops=200))
    x = random_input(2, 4)
    norms = [core(x, shared_inputs(2, 4), causal_attention, depth).state.abs().max() for depth in (10, 100, 200)]
    assert norms[2] < 3 * norms[0]


def test_cost_follows_the_mean_depth_not_the_longest():
    """The number of row passes through the block is the sum of depths."""
    core, x = random_core(), random_input(3, 2)
    passes = []
    core.block[0].register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    core.forward_sampled(x, shared_inputs(3, 2), causal_attention, DepthPlan((6, 1, 1), 2, (1, 2, 3)))
    assert sum(passes) == 8


@pytest.mark.parametrize("depth", [0, 7, -1])
def test_depth_outside_the_slots_is_refused(depth):
    with pytest.raises(ValueError, match="max_loops = 6"):
        random_core()(random_input(1, 2), shared_inputs(1, 2), causal_attention, depth)


def test_slots_are_numbered_without_gaps_and_each_call_has_its_own():
    called = []

    def attend(slot, q, k, v, mask):
        called.append(slot)
        return causal_attention(slot, q, k, v, mask)

    random_core()(random_input(1, 2), shared_inputs(1, 2), attend, CONFIG.max_loops)
    assert sorted([*called, CONFIG.copy_slot]) == list(range(CONFIG.num_slots))


def test_a_free_retention_starts_as_the_constrained_one_and_may_leave_the_unit_interval():
    cores = [LoopedCore(dataclasses.replace(CONFIG, spectral_constraint=on)) for on in (True, False)]
    x = random_input(2, 4).float()
    constrained, free = (core.injection for core in cores)
    torch.testing.assert_close(free.retention(), constrained.retention())
    torch.testing.assert_close(free.drive(x), constrained.drive(x))
    with torch.no_grad():
        free.a.fill_(1.5)
    assert (free.retention() == 1.5).all()
    cores[1](x, shared_inputs(2, 4), causal_attention, 3).h.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in free.parameters())
    norms = [cores[1](x, shared_inputs(2, 4), causal_attention, depth).state.abs().max() for depth in (3, 6)]
    assert norms[1] > 3 * norms[0]


def test_without_the_norm_on_e_the_injection_grows_with_what_comes_in():
    x = random_input(2, 4).float()
    for on, ratio in ((True, 1.0), (False, 10.0)):
        core = LoopedCore(dataclasses.replace(CONFIG, input_norm=on))
        assert ("input_norm.weight" in dict(core.named_parameters())) is on
        small, large = (core(s * x, shared_inputs(2, 4), causal_attention, 1).state for s in (1.0, 10.0))
        torch.testing.assert_close(large, ratio * small, rtol=1e-3, atol=1e-4)


def test_what_is_kept_for_the_backward_pass_follows_mu_bwd_and_not_the_depth():
    core, x = random_core(), random_input(2, 4)

    def kept(loops: int, mu_bwd: int) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            core.forward_sampled(x, shared_inputs(2, 4), causal_attention, DepthPlan((loops,) * 2, mu_bwd, (1, 2)))
        return sum(sizes)

    assert kept(2, 2) == kept(3, 2) == kept(6, 2)
    assert kept(6, 4) - kept(6, 3) == kept(6, 3) - kept(6, 2) > 0


def test_checkpointed_layers_keep_gradients_and_store_less():
    x = random_input(2, 16)
    plan = DepthPlan((4, 2), 3, (1, 2))
    gradients, stored = [], []
    for checkpointed in (False, True):
        core, sizes = random_core(), []
        if checkpointed:
            checkpoint_blocks(core)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t):
            out = core.forward_sampled(x, shared_inputs(2, 16), causal_attention, plan)
        out.h.square().sum().backward()
        gradients.append([parameter.grad for parameter in core.parameters()])
        stored.append(sum(sizes))
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)
    assert stored[1] < 0.2 * stored[0]


def test_state_stays_float32_in_a_bfloat16_core():
    core, x = random_core().bfloat16(), random_input(2, 4).bfloat16()
    rules = (Fixed(3), Convergence(1e-6, 3))
    states = [core(x, shared_inputs(2, 4), causal_attention, rule).state for rule in rules]
    assert [state.dtype for state in states] == [torch.float32] * 2
