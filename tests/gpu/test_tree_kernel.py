"""The tree kernel as it is compiled, against a softmax in float64, in launches of their own and in a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.conftest import GPU_DRY_RUN
from tests.support.tree_kernel_cases import SMALL, Case, draw, worst_error

pytest.importorskip("triton", reason="the tree kernel needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU_DRY_RUN, reason="a compiled kernel needs a GPU; an interpreter has its test"),
]
# Of the interpreter's tolerance: tensor cores add in an order of their own, and not all bits of a sum.
FACTOR = 4
LARGE = {
    f"{heads} heads, {num_tokens} tokens, {dim}, {dtype}": Case(
        heads=heads, kv_heads=8, num_tokens=num_tokens, length=length, dim=dim, capacity=9000, dtype=dtype
    )
    for heads, num_tokens, length in ((8, 1, 8192), (32, 64, 1000), (8, 512, 3000))
    for dim in (64, 80, 96, 128, 256)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
}


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_it_is_softmax_attention(name: str, record_property: Callable[[str, object], None]) -> None:
    """Shared memory, alignment and tensor cores are not interpreted."""
    case = (SMALL | LARGE)[name]
    record_property("part", "tree kernel")
    record_property("dtype", str(case.dtype).removeprefix("torch."))
    error = worst_error(case, torch.device("cuda"))
    record_property("error", error)
    record_property("tolerance", FACTOR)
    assert error <= FACTOR


def test_a_graph_follows_the_length() -> None:
    """The length is data: a graph that was captured with one must be right with any other."""
    from lp.attention.tree_kernel import tree_attention

    case = Case(num_tokens=16, heads=8, dim=128, capacity=2048, dtype=torch.bfloat16)
    steps = [draw(dataclasses.replace(case, length=length), torch.device("cuda")) for length in (700, 0, 1999)]
    q, k, v, visible, slots = (
        steps[0].q_1HTD.clone(), steps[0].k_1GCD.clone(), steps[0].v_1GCE.clone(),
        steps[0].visible_TT.clone(), steps[0].slot_mapping_T.clone(),
    )  # fmt: skip
    tree_attention(q, k, v, visible, slots, 0.1)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(q, k, v, visible, slots, 0.1)
    for step in steps:
        for buffer, value in zip(
            (q, k, v, visible, slots),
            (step.q_1HTD, step.k_1GCD, step.v_1GCE, step.visible_TT, step.slot_mapping_T),
            strict=True,
        ):
            buffer.copy_(value)
        graph.replay()
        expected = tree_attention(q, k, v, visible, slots, 0.1)
        assert out.isfinite().all() and torch.equal(out, expected)
