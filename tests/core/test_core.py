from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from loopwm.core import (
    AttentionInputs,
    CoreConfig,
    CoreState,
    DepthPlan,
    Fixed,
    LoopedCore,
    SharedState,
    StateGroup,
    Trace,
    causal_attention,
    prefix_attention,
    rotary_angles,
)
from loopwm.core.depth import DepthMoments, LearnedMean, MeanRamp
from tests.reference import looped as reference

THETA = 10000.0
CONFIG = CoreConfig(
    dim=8,
    heads=2,
    head_dim=4,
    mlp_dim=12,
    prelude_layers=1,
    block_layers=2,
    coda_layers=1,
    max_loops=6,
    norm_eps=1e-6,
    zoh=False,
)


def random_core(config: CoreConfig = CONFIG, seed: int = 0) -> LoopedCore:
    """A core in float64 whose weights are all random, the zero-initialised ones too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        core = LoopedCore(config).double()
        for parameter in core.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return core


def shared_inputs(batch: int, length: int, config: CoreConfig = CONFIG) -> AttentionInputs:
    positions = torch.arange(length).expand(batch, length)
    return AttentionInputs(*rotary_angles(positions, config.head_dim, THETA))


def random_input(batch: int, length: int, config: CoreConfig = CONFIG) -> torch.Tensor:
    return torch.randn(batch, length, config.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_forward_equals_the_reference_at_every_depth():
    core, x = random_core(), random_input(2, 5)
    for depth in (1, 2, 6):
        out = core(x, shared_inputs(2, 5), causal_attention, depth).h
        for row in range(2):
            h0 = torch.zeros(5, CONFIG.dim, dtype=torch.float64)
            expected = reference.row_forward(dict(core.named_parameters()), CONFIG, x[row], h0, depth, depth, THETA)
            torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)


def test_sampled_depth_gives_outputs_and_gradients_of_the_reference_with_the_last_mu_bwd_loops():
    """Rows of different depth in one batch: nothing of a row depends on the others, nor on when it joins."""
    core, x = random_core(), random_input(4, 3)
    plan = DepthPlan(loops=(5, 1, 3, 2), mu_bwd=2, noise_seeds=(1, 2, 3, 4))
    out = core.forward_sampled(x, shared_inputs(4, 3), causal_attention, plan).h
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parameters = dict(core.named_parameters())
    gradients = torch.autograd.grad((out * weight).sum(), list(parameters.values()))

    noise = plan.initial_state(3, CONFIG.dim, x.device).double()
    rows = [
        reference.row_forward(parameters, CONFIG, x[i], noise[i], plan.loops[i], plan.mu_bwd, THETA) for i in range(4)
    ]
    expected = torch.stack(rows)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), list(parameters.values()))
    for name, ours, theirs in zip(parameters, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_truncation_changes_gradients_so_the_comparison_above_can_fail():
    core, x = random_core(), random_input(1, 3)
    gradients = []
    for mu_bwd in (1, 4):
        plan = DepthPlan(loops=(4,), mu_bwd=mu_bwd, noise_seeds=(1,))
        out = core.forward_sampled(x, shared_inputs(1, 3), causal_attention, plan).h
        gradients.append(torch.autograd.grad(out.square().sum(), core.injection.a)[0])
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


@pytest.mark.parametrize("zoh", [False, True])
@pytest.mark.parametrize(("sign_a", "sign_b"), [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_retention_stays_inside_zero_and_one_and_state_bounded_after_a_large_gradient_step(zoh, sign_a, sign_b):
    """200 loops stay within the geometric sum |B_bar e| / (1 - A_bar): a fresh block adds nothing to it."""
    core = LoopedCore(dataclasses.replace(CONFIG, max_loops=200, zoh=zoh))
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


def test_exact_hold_reaches_the_fixed_point_that_euler_overshoots():
    """Zero-order hold: the fixed point of h' = A_bar h + B_bar e is B e / exp(a), whatever the step."""
    for a, b in ((0.0, 1.0), (1.0, -2.0)):
        core = LoopedCore(dataclasses.replace(CONFIG, zoh=True))
        with torch.no_grad():
            core.injection.a.fill_(a)
            core.injection.b.fill_(b)
        e = random_input(1, 2).float()
        fixed_point = core.injection.drive(e) / (1 - core.injection.retention())
        torch.testing.assert_close(fixed_point, e * torch.exp(torch.tensor(-a)))


def test_cost_follows_the_mean_depth_not_the_longest():
    """The number of row passes through the block is the sum of depths."""
    core, x = random_core(), random_input(3, 2)
    passes = []
    core.block[0].register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    core.forward_sampled(x, shared_inputs(3, 2), causal_attention, DepthPlan((6, 1, 1), 2, (1, 2, 3)))
    assert sum(passes) == 8


def test_depth_and_noise_depend_only_on_seed_step_and_global_row():
    together = DepthPlan.sample(7, 3, range(6), 4.0, 12)
    apart = [DepthPlan.sample(7, 3, [row], 4.0, 12) for row in range(6)]
    assert together.loops == tuple(plan.loops[0] for plan in apart)
    device = torch.device("cpu")
    for row, plan in enumerate(apart):
        shorter = plan.initial_state(3, 16, device)[0]
        # Vectorised and scalar code may differ in the last bit.
        torch.testing.assert_close(together.initial_state(5, 16, device)[row, :3], shorter, atol=1e-6, rtol=1e-5)
    assert together.loops != DepthPlan.sample(7, 4, range(6), 4.0, 12).loops


def test_sampled_depths_are_poisson_with_a_floor_of_one_and_noise_has_the_stated_variance():
    plan = DepthPlan.sample(0, 0, range(4000), 4.0, 12)
    assert min(plan.loops) == 1
    assert max(plan.loops) <= 12
    assert abs(plan.mean - (4 + 2.718281828**-4)) < 0.1
    assert plan.mu_bwd == 2
    noise = DepthPlan((1,), 1, (0,)).initial_state(2000, 10, torch.device("cpu"))
    assert abs(noise.std().item() / (2 / 50) ** 0.5 - 0.987) < 0.02  # cutting at three deviations removes 1.3 %
    assert noise.abs().max() <= 3 * (2 / 50) ** 0.5


def test_other_samplings_share_noise_and_differ_in_depth_alone():
    apart = DepthPlan.sample(7, 3, range(6), 4.0, 12)
    alike = DepthPlan.sample_batch(7, 3, range(6), 4.0, 12)
    constant = DepthPlan.constant(7, 3, range(6), 4.0, 12)
    assert len(set(apart.loops)) > 1
    assert alike.loops == (apart.loops[0],) * 6
    assert constant.loops == (4,) * 6
    assert apart.noise_seeds == alike.noise_seeds == constant.noise_seeds
    means = [DepthPlan.sample_batch(7, step, range(6), 4.0, 12).mean for step in range(2000)]
    assert abs(sum(means) / 2000 - (4 + 2.718281828**-4)) < 0.15


def test_the_ramp_ends_at_mu_rec():
    assert [MeanRamp(1.0, 4.0, 6).at(step) for step in (0, 2, 6, 99)] == [1.0, 2.0, 4.0, 4.0]
    assert MeanRamp(1.0, 4.0, 0).at(0) == 4.0


@pytest.mark.parametrize("price", [0.0, 0.04, 2.0])
def test_a_learned_mean_settles_where_a_loop_gains_what_it_costs(price):
    """loss(T) = exp(-T / 2): the least expected cost lies at the upper end, between, and at the lower end."""

    def cost(mu):
        chances = [math.exp(-mu) * mu**n / math.factorial(n) for n in range(60)]
        return sum(c * (math.exp(-min(max(n, 1), 8) / 2) + price * min(max(n, 1), 8)) for n, c in enumerate(chances))

    best = min((mu / 10 for mu in range(10, 81)), key=cost)
    assert {0.0: best == 8, 0.04: 2 < best < 8, 2.0: best == 1}[price]
    mean = LearnedMean(3.0, max_loops=8, price=price, rate=3.0)
    for step in range(1500):
        plan = DepthPlan.sample(0, step, range(16), mean.mu_rec, 8)
        loops = np.array(plan.loops)
        nats = np.exp(-loops / 2)
        mean.update(DepthMoments(nats.mean(), loops.mean(), (nats * loops).mean(), (loops**2).mean()))
    assert abs(mean.mu_rec - best) < 1.2
    resumed = LearnedMean(1.0, max_loops=8, price=price, rate=3.0)
    resumed.load_state_dict(mean.state_dict())
    assert (resumed.mu_rec, resumed.baseline) == (mean.mu_rec, mean.baseline)


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


def keys(state: CoreState) -> torch.Tensor:
    return state.columns(0)[0]


def test_states_that_share_a_buffer_never_see_each_others_columns():
    """Any order of forks, crops, selections and appends equals the same on plain lists."""
    rng = random.Random(0)
    states: list[tuple[CoreState, list[float]]] = []
    root = CoreState(1, torch.device("cpu"))
    root.extend(torch.ones(1, 1, dtype=torch.bool))
    root.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    states.append((root, [0.0]))
    for number in range(1, 300):
        state, expected = rng.choice(states)
        action = rng.choice(["append", "append", "fork", "crop", "select"])
        if action == "append":
            column = torch.full((1, 1, 1, 1), float(number))
            state.extend(torch.ones(1, 1, dtype=torch.bool))
            state.update(column, column, 0)
            expected.append(float(number))
        elif action == "fork":
            states.append((state.fork(), list(expected)))
        elif action == "select":
            states.append((state.select(torch.tensor([0])), list(expected)))
        elif len(expected) > 1:
            states.append((state.crop(1), expected[:-1]))
    for state, expected in states:
        assert keys(state).flatten().tolist() == expected
        assert state.valid.shape[1] == len(expected)


def test_gradients_flow_through_a_state():
    state = CoreState(1, torch.device("cpu"))
    first, second = (torch.ones(1, 1, 1, 2, requires_grad=True) for _ in range(2))
    state.update(first, first, 0)
    state.update(2 * second, second, 0)[0].sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    assert second.grad.tolist() == [[[[2.0, 2.0]]]]


def test_forks_and_selections_of_a_state_are_independent():
    state = CoreState(2, torch.device("cpu"))
    state.extend(torch.tensor([[False, True], [True, True]]))
    state.update(torch.ones(2, 1, 2, 3), torch.ones(2, 1, 2, 3), 0)
    fork = state.fork()
    positions, mask = fork.extend(torch.tensor([[True], [True]]))
    fork.update(torch.zeros(2, 1, 1, 3), torch.zeros(2, 1, 1, 3), 0)
    assert keys(state).shape[2] == 2
    assert keys(fork).shape[2] == 3
    assert positions.tolist() == [[1], [2]]
    assert mask[:, 0, 0].tolist() == [[False, True, True], [True, True, True]]
    chosen = fork.select(torch.tensor([1, 1, 0]))
    assert chosen.next_position.tolist() == [3, 3, 2]
    assert fork.crop(1).next_position.tolist() == state.next_position.tolist()
    assert fork.nbytes() == 2 * 2 * 3 * 3 * 4
    with pytest.raises(ValueError, match="cannot crop"):
        state.crop(3)


@pytest.mark.parametrize("owned", [True, False])
def test_rows_that_close_up_are_those_that_a_selection_copies(owned):
    state = CoreState(4, torch.device("cpu"))
    for column in range(3):
        state.extend(torch.tensor([[True], [column > 0], [column > 1], [True]]))
        state.update(*torch.randn(2, 4, 2, 1, 3), 0)
    kept, rows = state.select(torch.arange(4)), [0, 3]
    expected = state.select(torch.tensor(rows))
    moved = (state if owned else state.fork()).move(rows)
    for pair in zip(moved.columns(0), expected.columns(0), strict=True):
        assert torch.equal(*pair)
    assert torch.equal(moved.valid, expected.valid)
    assert torch.equal(moved.next_position, expected.next_position)
    in_place = moved.columns(0)[0].data_ptr() == state.columns(0)[0].data_ptr()
    assert in_place == owned
    if not owned:
        assert torch.equal(keys(state), keys(kept))
    moved.extend(torch.ones(2, 1, dtype=torch.bool))
    moved.update(*torch.ones(2, 2, 2, 1, 3), 0)
    assert torch.equal(keys(moved)[:, :, :3], keys(expected))
    with pytest.raises(ValueError, match="onto one another"):
        kept.move([1, 0])


def test_a_free_retention_starts_as_the_constrained_one_and_may_leave_the_unit_interval():
    cores = [LoopedCore(dataclasses.replace(CONFIG, spectral_constraint=on)) for on in (True, False)]
    x = random_input(2, 4).float()
    constrained, free = (core.injection for core in cores)
    torch.testing.assert_close(free.retention(), constrained.retention())
    torch.testing.assert_close(free.drive(x), constrained.drive(x))
    with torch.no_grad():
        free.A_bar.fill_(1.5)
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


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_rows_of_a_shared_state_are_what_they_would_be_with_the_prefix_repeated(kv_heads):
    """Passes of one and several columns, with padding, after selection, join and with rows that left early."""
    core, loops = random_core(dataclasses.replace(CONFIG, kv_heads=kv_heads)), CONFIG.loop_slots
    prefix, x = CoreState(1, torch.device("cpu")), random_input(4, 9)
    passes = [torch.ones(4, 3, dtype=torch.bool), torch.tensor([[True, True], [False, True]] * 2), torch.ones(4, 1) > 0]

    def run(state, inputs, valid, rule):
        def attend(slot, q, k, v, mask):
            k, v = state.update(k, v, slot)
            if isinstance(state, SharedState):
                return prefix_attention(q, k, v, mask, *state.prefix.columns(slot))
            return causal_attention(slot, q, k, v, mask)

        positions, mask = state.extend(valid)
        shared = AttentionInputs(*rotary_angles(positions, CONFIG.head_dim, THETA), mask)
        out = core(inputs, shared, attend, rule)
        state.finish(loops, out.loops, rule.limit, valid.shape[1])
        return out.h

    with torch.no_grad():
        run(prefix, x[:1, :3], torch.ones(1, 3, dtype=torch.bool), Fixed(3))
        shared, repeated = SharedState(prefix, 4), prefix.select(torch.zeros(4, dtype=torch.long))
        start, rows = 3, 4
        for valid, left in zip(passes, (Fixed(3), Trace(((1,), (3,), (2,), (1,))), Fixed(3)), strict=True):
            end = start + valid.shape[1]
            outs = [run(state, x[:rows, start:end], valid[:rows], left) for state in (shared, repeated)]
            torch.testing.assert_close(*outs)
            start = end
        for slot in range(2):
            torch.testing.assert_close(shared.whole().columns(slot), repeated.columns(slot))
        one, others = shared.select(torch.tensor([1])), shared.select(torch.tensor([3, 0]))
        joined, expected = one.join(others), repeated.select(torch.tensor([1, 3, 0]))
        absorbed = one.fork().absorb(others)
        outs = [run(state, x[:3, 8:9], torch.ones(3, 1) > 0, Fixed(2)) for state in (joined, absorbed, expected)]
        torch.testing.assert_close(outs[0], outs[2])
        torch.testing.assert_close(outs[1], outs[2])
    with pytest.raises(ValueError, match="share one prefix"):
        one.join(SharedState(prefix.fork(), 1))
    with pytest.raises(ValueError, match="share one prefix"):
        one.absorb(SharedState(prefix.fork(), 1))
    with pytest.raises(ValueError, match="one row without padding"):
        SharedState(repeated, 2)


def test_rows_that_come_and_go_keep_their_columns():
    """Any order of arrivals, departures and appends leaves each row what it is on plain lists, and nothing of rows that
    are gone: neither columns nor, after a while, memory."""
    rng = random.Random(0)
    state, expected, number = CoreState(0, torch.device("cpu")), [], 0
    state.update(*torch.zeros(2, 0, 1, 0, 1), 0)

    def arrived(length: int) -> tuple[CoreState, list[float]]:
        values = [float(number + i) for i in range(length)]
        new = CoreState(1, torch.device("cpu"))
        new.extend(torch.ones(1, length, dtype=torch.bool))
        new.update(*torch.tensor(values).expand(2, 1, 1, length).unsqueeze(-1), 0)
        return new, values

    for _ in range(400):
        coming = [arrived(rng.randint(1, 5)) for _ in range(rng.choice([0, 0, 1, 2]))]
        if coming:
            state = state.absorb(*(new for new, _ in coming))
            expected += [values for _, values in coming]
        stay = [row for row in range(len(expected)) if rng.random() > 0.1]
        stay = stay[-8:]
        order = [row for row in stay if row < len(stay)]
        late = iter(row for row in stay if row >= len(stay))
        order = [row if row in order else next(late) for row in range(len(stay))]
        state, expected = state.move(order), [expected[row] for row in order]
        number += 10
        state.extend(torch.ones(len(order), 1, dtype=torch.bool))
        state.update(*torch.full((2, len(order), 1, 1, 1), float(number)), 0)
        for values in expected:
            values.append(float(number))
        for row, values in enumerate(expected):
            assert keys(state)[row, 0, state.valid[row], 0].tolist() == values
        assert state.valid.shape[1] == max(map(len, expected), default=1)
        assert keys(state).isfinite().all()
        assert keys(state).untyped_storage().nbytes() <= 4 * 2 * 16 * (100 + 64)


def test_states_side_by_side_are_what_each_is_alone():
    """Rows of several lengths, one of them behind a shared prefix, through passes of several columns and depths."""
    core, rule = random_core(), Trace(((2,), (3,), (1,), (3,)))

    def attention(state):
        def attend(slot, q, k, v, mask):
            k, v = state.update(k, v, slot)
            if isinstance(state, SharedState):
                return prefix_attention(q, k, v, mask, *state.prefix.columns(slot))
            return causal_attention(slot, q, k, v, mask)

        return attend

    def run(state, attend, inputs, valid, rule):
        positions, mask = state.extend(valid)
        shared = AttentionInputs(*rotary_angles(positions, CONFIG.head_dim, THETA), mask)
        out = core(inputs, shared, attend, rule)
        state.finish(CONFIG.loop_slots, out.loops, rule.limit, valid.shape[1])
        return out.h

    def begun(rows, columns):
        state = CoreState(rows, torch.device("cpu"))
        run(state, attention(state), random_input(rows, columns), torch.ones(rows, columns) > 0, Fixed(3))
        return state

    with torch.no_grad():
        states = [begun(1, 4), SharedState(begun(1, 3), 2), begun(1, 2)]
        alone = [state.fork() for state in states]
        group = StateGroup(states)
        for valid in (torch.tensor([[True, True], [False, True], [True, True], [False, True]]), torch.ones(4, 1) > 0):
            x = random_input(4, valid.shape[1])
            together = run(group, group.attend(attention), x, valid, rule)
            rows = torch.arange(4).split([1, 2, 1])
            for state, part in zip(alone, rows, strict=True):
                own = Trace(tuple(rule.loops[row] for row in part))
                torch.testing.assert_close(together[part], run(state, attention(state), x[part], valid[part], own))
    for state, expected in zip(states, alone, strict=True):
        torch.testing.assert_close(state.columns(0), expected.columns(0))
        assert torch.equal(state.next_position, expected.next_position)
