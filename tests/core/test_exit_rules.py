from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from loopwm.core import exit_rules
from loopwm.core.block import AttentionInputs, causal_attention, rotary_angles
from loopwm.core.exit_rules import (
    Convergence,
    ExitGate,
    ExitRule,
    Fixed,
    Gate,
    LoopView,
    format_rule,
    make_rule,
    name_of,
    parse_rule,
)
from loopwm.core.kv_cache import KVCache
from loopwm.core.looped import LoopedCore
from tests.core.cores import CONFIG, THETA, random_core, random_input, shared_inputs
from tests.fixtures.trace import Trace
from tests.reference import halting as reference

GATED = dataclasses.replace(CONFIG, exit_gate=True)
ENDS = (3, 5, 6, 7)
"""Where the columns of a row are cut into passes."""
MIXED = Trace(((4, 1, 3, 2), (4, 4, 1, 1), (4, 2, 2, 4)))
LIMIT = MIXED.limit


def gated_core() -> LoopedCore:
    """A core whose gate leaves at different depths: it leans on one direction of the state."""
    core = random_core(GATED)
    with torch.no_grad():
        core.gate.linear.weight.mul_(4)
    return core


def run_passes(
    core: LoopedCore, x: torch.Tensor, rules: Sequence[ExitRule]
) -> tuple[torch.Tensor, torch.Tensor, KVCache]:
    """Outputs (B, L, D), loops (B, passes) and the state after the passes of ENDS."""
    state = KVCache(len(x), x.device)

    def attend(slot, q, k, v, mask):
        k, v = state.update(k, v, slot)
        return causal_attention(slot, q, k, v, mask)

    outs, loops = [], []
    with torch.no_grad():
        for (start, end), rule in zip(pairwise((0, *ENDS)), rules, strict=True):
            positions, mask = state.extend(torch.ones(len(x), end - start, dtype=torch.bool))
            shared = AttentionInputs(*rotary_angles(positions, CONFIG.head_dim, THETA), mask)
            out = core(x[:, start:end], shared, attend, rule)
            state.finish(core.config.loop_slots, out.loops, rule.limit, end - start)
            outs.append(out.h)
            loops.append(out.loops)
    return torch.cat(outs, dim=1), torch.stack(loops, dim=1), state


def passes_of(trace: Trace) -> list[ExitRule]:
    rows = range(len(trace.loops))
    return [Fixed(LIMIT), *(trace.for_pass(i, rows) for i in range(1, len(ENDS)))]


def test_later_columns_see_what_a_slow_reference_says_of_rows_that_left_early():
    """A shallow pass between deep ones, a deep one after shallow ones, and slots that no row of a pass reached."""
    core, x = random_core(), random_input(3, ENDS[-1])
    out, loops, _ = run_passes(core, x, passes_of(MIXED))
    assert loops.tolist() == [list(row) for row in MIXED.loops]
    with torch.no_grad():
        for row in range(3):
            weights = dict(core.named_parameters())
            taken = MIXED.loops[row]
            expected = reference.row_passes(weights, CONFIG, x[row], ENDS, taken, THETA)
            torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-4)


def test_passes_of_a_single_loop_equal_one_pass():
    core, x = random_core(), random_input(2, ENDS[-1])
    out, _, _ = run_passes(core, x, [Fixed(1)] * len(ENDS))
    with torch.no_grad():
        whole = core(x, shared_inputs(2, ENDS[-1]), causal_attention, 1).h
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", [Gate(0.5, LIMIT), Convergence(0.4, LIMIT)])
def test_mixed_exits_in_a_batch_equal_the_same_rows_alone(rule):
    core, x = gated_core(), random_input(8, ENDS[-1])
    rules = [Fixed(LIMIT), rule, rule, rule]
    out, loops, _ = run_passes(core, x, rules)
    assert len(loops[:, 1:].unique()) >= 3, loops
    for row in range(8):
        alone, loops_alone, _ = run_passes(core, x[row : row + 1], rules)
        assert loops_alone[0].tolist() == loops[row].tolist()
        torch.testing.assert_close(alone[0], out[row], atol=1e-5, rtol=1e-4)


def test_a_replayed_trace_is_bitwise_what_it_was_taken_from():
    core, x = gated_core(), random_input(8, ENDS[-1])
    out, loops, _ = run_passes(core, x, [Fixed(LIMIT), *[Gate(0.5, LIMIT)] * 3])
    trace = Trace(tuple(map(tuple, loops.tolist())))
    again, loops_again, _ = run_passes(core, x, [Fixed(LIMIT), *(trace.for_pass(i, range(8)) for i in (1, 2, 3))])
    assert torch.equal(loops_again, loops)
    assert torch.equal(again, out)


def test_states_of_mixed_depth_are_forked_selected_and_joined_like_any_other():
    core, x = random_core(), random_input(3, ENDS[-1])
    _, _, state = run_passes(core, x, passes_of(MIXED))
    joined = state.select(torch.tensor([2])).join(state.fork().select(torch.tensor([0, 1])))
    assert type(joined) is type(state)
    slot = CONFIG.loop_slots[1][0]
    assert torch.equal(joined.columns(slot)[0], state.columns(slot)[0][[2, 0, 1]])
    assert joined.nbytes() == state.nbytes()


def test_a_row_that_leaves_has_the_output_and_states_of_its_own_depth():
    core, x = random_core(), random_input(3, 4)
    mixed = core(x, shared_inputs(3, 4), causal_attention, Trace(((1,), (5,), (3,))))
    assert mixed.loops.tolist() == [1, 5, 3]
    for row, depth in enumerate((1, 5, 3)):
        alone = core(x[row : row + 1], shared_inputs(1, 4), causal_attention, depth)
        for name in ("h", "state", "previous_state"):
            torch.testing.assert_close(getattr(mixed, name)[row], getattr(alone, name)[0], atol=1e-6, rtol=1e-5)


def test_a_pass_costs_what_its_deepest_row_costs():
    core, x = random_core(), random_input(3, 2)
    passes = []
    core.block[0].register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    core(x, shared_inputs(3, 2), causal_attention, Trace(((1,), (3,), (2,))))
    assert passes == [3, 3, 3]


def test_the_gate_is_a_linear_layer_on_the_state():
    gate = ExitGate(3)
    with torch.no_grad():
        gate.linear.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
        gate.linear.bias.fill_(0.25)
    assert gate(torch.tensor([[2.0, 1.0, 4.0], [0.0, 1.0, 0.0]])).tolist() == [2.25, -1.75]


def test_the_decision_is_the_mean_over_the_exit_columns():
    core, x = gated_core(), random_input(6, 5)
    for columns in (1, 3):
        pooled = [core(x, shared_inputs(6, 5), causal_attention, depth).state for depth in range(1, 7)]
        gates = torch.stack([core.gate(h[:, -columns:].mean(1)).sigmoid() for h in pooled], 1)
        tau = gates.flatten().median().item()
        expected = [next((t for t, g in enumerate(row, 1) if g > tau), 6) for row in gates.tolist()]
        assert core(x, shared_inputs(6, 5), causal_attention, Gate(tau, 6), columns).loops.tolist() == expected


def view(gates: list[float], states: list[list[float]] | None = None) -> LoopView:
    return LoopView(len(gates), [torch.tensor([s]) for s in states or [[0.0]]], torch.tensor([gates]))


def test_rules_leave_where_their_formulas_say():
    assert Gate(0.6, 9).exits(view([0.1, 0.61])).item()
    assert not Gate(0.6, 9).exits(view([0.9, 0.6])).item()
    # The second difference of 1, 2, 3.1 is 0.1.
    assert Convergence(0.1 / 3, 9).exits(view([0, 0], [[1.0], [2.0], [3.1]])).item()
    assert not Convergence(0.1 / 3.2, 9).exits(view([0, 0], [[1.0], [2.0], [3.1]])).item()
    assert not Convergence(9.0, 9).exits(view([0], [[1.0], [2.0]])).item()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Gate(0.0, 4), "tau: .*got 0.0"),
        (lambda: Gate(1.0, 4), "tau: .*got 1.0"),
        (lambda: Gate(float("nan"), 4), "tau: .*got nan"),
        (lambda: Convergence(0.0, 4), "eps: .*got 0.0"),
        (lambda: Trace(()), "loops: must be numbers"),
        (lambda: Trace(((2, 0),)), "loops: must be numbers"),
    ],
)
def test_impossible_rules_are_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("depth", "named"),
    [
        (Gate(0.5, 4), "Gate needs an exit gate"),
        (Convergence(0.1, 0), "must be 1 to max_loops = 6, got 0 loops"),
        (Convergence(0.1, 7), "must be 1 to max_loops = 6, got 7 loops"),
        ("gate", "must be a number of loops or an exit rule"),
        (True, "must be a number of loops or an exit rule"),
        (2.0, "must be a number of loops or an exit rule"),
        (None, "must be a number of loops or an exit rule"),
    ],
)
def test_a_depth_that_a_core_cannot_run_is_refused_before_anything_is_computed(depth, named):
    def attend(*_):
        raise AssertionError("computed")

    with pytest.raises(ValueError, match=named):
        random_core()(random_input(1, 2), shared_inputs(1, 2), attend, depth)


def test_a_trace_for_another_batch_is_refused():
    with pytest.raises(ValueError, match="must be 2 rows as the batch, got 3"):
        random_core()(random_input(2, 2), shared_inputs(2, 2), causal_attention, Trace(((1,), (2,), (1,))))
    with pytest.raises(ValueError, match="must have row 2, got a trace of 2 rows"):
        Trace(((1,), (2,))).for_pass(0, range(3))


@pytest.mark.parametrize("rule", [Fixed(3), Gate(0.5, 4), Convergence(0.1, 4)])
def test_what_is_written_of_a_rule_is_read_as_it(rule):
    assert parse_rule(str(format_rule(rule))) == rule
    assert make_rule(name_of(rule), vars(rule)) == rule


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0", "must be a number of loops or one of"),
        ("-1", "must be a number of loops or one of"),
        ("magic:x=1", "must be a number of loops or one of"),
        ("trace:loops=1", "must be a number of loops or one of"),
        ("gate:tau=0.5", "limit: missing"),
        ("gate:tau=0.5,limit=4,q=1", "q: unknown"),
        ("gate:tau=half,limit=4", "half"),
        ("gate:tau=2,limit=4", "tau: must be inside .0, 1., got 2.0"),
        ("gate:tau=0.5,limit=2.5", "2.5"),
    ],
)
def test_a_text_that_is_no_rule_is_refused_by_name(text, named):
    with pytest.raises(ValueError, match=named):
        parse_rule(text)


def test_a_rule_from_outside_is_known_by_its_name_alone(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Second:
        """Leaves after the second loop."""

        limit: int

    monkeypatch.setitem(exit_rules.RULES, "second", Second)
    assert parse_rule("second:limit=3") == Second(3)
    assert format_rule(Second(3)) == "second:limit=3"
