"""A collective that a compiler's kernels leave out is refused, not lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from meshwright.errors import UnsupportedError
from meshwright.tracer.compiled.torch_compile import communicated, require_kernels, require_recorded

_ops = torch.ops._c10d_functional


def reduced(x: Tensor) -> Tensor:
    total: Tensor = _ops.wait_tensor(_ops.all_reduce_(x * 2, "sum", "0")) + 1
    return total


@pytest.fixture
def graph() -> fx.GraphModule:
    traced = fx.symbolic_trace(reduced)
    for node in traced.graph.nodes:
        if node.op == "call_function" and hasattr(node.target, "default"):
            node.target = node.target.default
    return traced


def test_a_collective_without_a_kernel_is_refused(graph: fx.GraphModule) -> None:
    product, total, waited = list(graph.graph.nodes)[1:4]
    require_kernels(graph, [total, waited])
    with pytest.raises(
        UnsupportedError, match=r"all_reduce_.*outside of the compiled module, or .* backend=\"aot_eager\""
    ):
        require_kernels(graph, [product, waited])
    with pytest.raises(UnsupportedError, match="wait_tensor"):
        require_kernels(graph, [total])


def test_a_collective_that_ran_as_part_of_a_kernel_is_refused(graph: fx.GraphModule) -> None:
    product, total = list(graph.graph.nodes)[1:3]
    require_recorded([total], {product})
    with pytest.raises(UnsupportedError, match="all_reduce_"):
        require_recorded([total], {product, total})


def test_what_waits_returns_the_memory_of_what_it_waits_for(graph: fx.GraphModule) -> None:
    product, total, waited = list(graph.graph.nodes)[1:4]
    assert [communicated(one) for one in (waited, total, product)] == [total, product, None]
