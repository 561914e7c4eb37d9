"""What training does faster than plainly: attention in blocks, and layers that are compiled."""

import math

import pytest
import torch

from loopwm.core.block import AttentionInputs, Block, causal_attention, compile_blocks, rotary_angles
from loopwm.core.training_attention import QUERY_BLOCK, training_attention
from loopwm.runtime import compiler_found


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("seen", [None, "some"])
def test_attention_in_blocks_of_queries_is_attention_with_its_gradients(kv_heads, seen):
    length, generator = 2 * QUERY_BLOCK + 9, torch.Generator().manual_seed(0)
    mask = torch.rand(length, length, generator=generator) < 0.3 if seen else torch.ones(length, length).tril() > 0
    mask |= torch.eye(length, dtype=torch.bool)
    q, k, v = (torch.randn(2, heads, length, 8, generator=generator) for heads in (4, kv_heads, kv_heads))
    weight = torch.randn(2, 4, length, 8, generator=generator)

    def run(attention, dtype):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        (out.float() * weight).sum().backward()
        return [out, *(x.grad for x in inputs)]

    def plain(q, k, v):
        k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))
        return ((q @ k.mT) / 8**0.5).masked_fill(~mask, -math.inf).softmax(-1) @ v

    expected = run(plain, torch.float64)
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 0.06)):
        for found, exact in zip(
            run(lambda *x: training_attention(*x, mask if seen else None), dtype), expected, strict=True
        ):
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), exact.double(), atol=close, rtol=close)


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="no C++ compiler")
def test_compiled_layers_are_the_layers_with_their_gradients_at_all_lengths():
    torch.manual_seed(0)
    plain, compiled = (Block(32, 4, 2, 8, 64, 1e-5) for _ in range(2))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    compiled.load_state_dict(plain.state_dict())
    compile_blocks(compiled, dynamic=True)
    for rows, length in ((2, 9), (3, 17), (1, 5)):
        shared = AttentionInputs(*rotary_angles(torch.arange(length)[None], 8, 1e4))
        x, weight = torch.randn(rows, length, 32), torch.randn(rows, length, 32)
        found = []
        for block in (plain, compiled):
            block.zero_grad()
            own = x.clone().requires_grad_()
            out = block(own, shared, causal_attention, 0)
            (out * weight).sum().backward()
            found.append([out, own.grad, *(p.grad for p in block.parameters())])
        for expected, other in zip(*found, strict=True):
            torch.testing.assert_close(other, expected, atol=1e-3, rtol=1e-3)


def test_layers_are_compiled_for_more_than_eight_shapes(monkeypatch):
    """Beyond PyTorch's own limit, 8, later shapes would run uncompiled."""
    graphs, compiler = [], torch.compile

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiler(function, backend=record, dynamic=dynamic))
    torch.compiler.reset()
    block, lengths = Block(4, 1, 1, 4, 4, 1e-5), range(2, 11)
    with torch._dynamo.config.patch(recompile_limit=8), torch.no_grad():  # monkeypatch would hide the option for ever
        compile_blocks(block, dynamic=False)
        for length in lengths:
            shared = AttentionInputs(*rotary_angles(torch.arange(length)[None], 4, 1e4))
            block(torch.randn(1, length, 4), shared, causal_attention, 0)
    torch.compiler.reset()
    assert len(graphs) == 2 * len(lengths)  # before attention and after it
