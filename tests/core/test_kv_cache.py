"""Keys and values of rows that fork, close up, share a prefix or stand side by side are what each row has alone."""

from __future__ import annotations

import dataclasses
import gc
import random

import pytest
import torch

from loopwm.core.block import AttentionInputs, causal_attention, prefix_attention, rotary_angles
from loopwm.core.exit_rules import Fixed
from loopwm.core.kv_cache import KVCache, RaggedBatch, allocated_bytes
from tests.core.cores import CONFIG, THETA, random_core, random_input
from tests.fixtures.trace import Trace


def keys(state: KVCache) -> torch.Tensor:
    return state.columns(0)[0]


def test_states_that_share_a_buffer_never_see_each_others_columns():
    """Any order of forks, crops, selections and appends equals the same on plain lists."""
    rng = random.Random(0)
    states: list[tuple[KVCache, list[float]]] = []
    root = KVCache(1, torch.device("cpu"))
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
            states.append((state.crop(0, len(expected) - 1), expected[:-1]))
    for state, expected in states:
        assert keys(state).flatten().tolist() == expected
        assert state.valid.shape[1] == len(expected)


def test_reserved_columns_are_allocated_once_and_hold_the_same():
    reserved, plain = KVCache(1, torch.device("cpu")), KVCache(1, torch.device("cpu"))
    reserved.reserved = 300
    for number in range(150):
        column = torch.full((1, 1, 1, 1), float(number))
        reserved.update(column, column, 0)
        plain.update(column, column, 0)
    late = plain.fork()
    plain.update(column + 9, column + 9, 0)  # so that the fork has to copy
    late.reserved = 300
    buffers = [reserved._buffers[0]]
    for number in range(150, 300):
        column = torch.full((1, 1, 1, 1), float(number))
        for state in (reserved, late):
            state.update(column, column, 0)
            buffers.append(state._buffers[0])
    assert len(set(map(id, buffers))) == 2
    for state in (reserved, late):
        assert keys(state).flatten().tolist() == list(map(float, range(300)))


def test_moved_rows_count_all_that_their_views_keep():
    gc.collect()
    before = allocated_bytes()
    long, short = (KVCache(1, torch.device("cpu")) for _ in range(2))
    for state, length in ((long, 4000), (short, 10)):
        state.extend(torch.ones(1, length, dtype=torch.bool))
        state.update(torch.zeros(1, 1, length, 8), torch.zeros(1, 1, length, 8), 0)
    moved = long.join(short, in_place=True).move([1])
    del long, short, state
    gc.collect()
    kept = moved._buffers[0].data.untyped_storage().nbytes()
    assert kept > 10 * moved._buffers[0].data.nbytes
    assert allocated_bytes() - before == kept
    del moved
    gc.collect()
    assert allocated_bytes() == before


def test_gradients_flow_through_a_state():
    state = KVCache(1, torch.device("cpu"))
    first, second = (torch.ones(1, 1, 1, 2, requires_grad=True) for _ in range(2))
    state.update(first, first, 0)
    state.update(2 * second, second, 0)[0].sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    assert second.grad.tolist() == [[[[2.0, 2.0]]]]


def test_forks_and_selections_of_a_state_are_independent():
    state = KVCache(2, torch.device("cpu"))
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
    assert fork.crop(0, 2).next_position.tolist() == state.next_position.tolist()
    assert fork.nbytes() == 2 * 2 * 3 * 3 * 4
    with pytest.raises(ValueError, match="within 0 and 2"):
        state.crop(0, 3)


@pytest.mark.parametrize("owned", [True, False])
def test_rows_that_close_up_are_those_that_a_selection_copies(owned):
    state = KVCache(4, torch.device("cpu"))
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


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_rows_of_a_shared_state_are_what_they_would_be_with_the_prefix_repeated(kv_heads):
    """Passes of one and several columns, with padding, after selection, join and with rows that left early."""
    core, loops = random_core(dataclasses.replace(CONFIG, kv_heads=kv_heads)), CONFIG.loop_slots
    prefix, x = KVCache(1, torch.device("cpu")), random_input(4, 9)
    passes = [torch.ones(4, 3, dtype=torch.bool), torch.tensor([[True, True], [False, True]] * 2), torch.ones(4, 1) > 0]

    def run(state, inputs, valid, rule):
        def attend(slot, q, k, v, mask):
            k, v = state.update(k, v, slot)
            if state.prefix is not None:
                return prefix_attention(q, k, v, mask, *state.prefix.columns(slot))
            return causal_attention(slot, q, k, v, mask)

        positions, mask = state.extend(valid)
        shared = AttentionInputs(*rotary_angles(positions, CONFIG.head_dim, THETA), mask)
        out = core(inputs, shared, attend, rule)
        state.finish(loops, out.loops, rule.limit, valid.shape[1])
        return out.h

    with torch.no_grad():
        run(prefix, x[:1, :3], torch.ones(1, 3, dtype=torch.bool), Fixed(3))
        shared, repeated = prefix.share(4), prefix.select(torch.zeros(4, dtype=torch.long))
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
        absorbed = one.fork().join(others, in_place=True)
        outs = [run(state, x[:3, 8:9], torch.ones(3, 1) > 0, Fixed(2)) for state in (joined, absorbed, expected)]
        torch.testing.assert_close(outs[0], outs[2])
        torch.testing.assert_close(outs[1], outs[2])
    with pytest.raises(ValueError, match="share one prefix"):
        one.join(prefix.fork().share(1))
    with pytest.raises(ValueError, match="share one prefix"):
        one.join(prefix.fork().share(1), in_place=True)
    with pytest.raises(ValueError, match="row without padding"):
        repeated.share(2)


def test_rows_that_come_and_go_keep_their_columns():
    """Any order of arrivals, departures and appends leaves each row what it is on plain lists, and nothing of rows that
    are gone: neither columns nor, after a while, memory."""
    rng = random.Random(0)
    state, expected, number = KVCache(0, torch.device("cpu")), [], 0
    state.update(*torch.zeros(2, 0, 1, 0, 1), 0)

    def arrived(length: int) -> tuple[KVCache, list[float]]:
        values = [float(number + i) for i in range(length)]
        new = KVCache(1, torch.device("cpu"))
        new.extend(torch.ones(1, length, dtype=torch.bool))
        new.update(*torch.tensor(values).expand(2, 1, 1, length).unsqueeze(-1), 0)
        return new, values

    for _ in range(400):
        coming = [arrived(rng.randint(1, 5)) for _ in range(rng.choice([0, 0, 1, 2]))]
        if coming:
            state = state.join(*(new for new, _ in coming), in_place=True)
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
            if state.prefix is not None:
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
        state = KVCache(rows, torch.device("cpu"))
        run(state, attention(state), random_input(rows, columns), torch.ones(rows, columns) > 0, Fixed(3))
        return state

    with torch.no_grad():
        states = [begun(1, 4), begun(1, 3).share(2), begun(1, 2)]
        alone = [state.fork() for state in states]
        group = RaggedBatch(states)
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
