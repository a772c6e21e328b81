"""What CUDA graphs of microbatches (layout.cuda_graphs) do not go with, checked before any process starts.

A graph repeats kernels on the same memory. What the host decides or moves between kernels is no part of it, and is
refused here, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.spec.job.rules.compile_rules import one_graph_problems
from meshwright.spec.job.sections import Float8Recipe, OptimizerSection
from meshwright.spec.layout.attention_backend import SPARSE_BACKENDS
from meshwright.spec.layout.layout import Layout
from meshwright.spec.problem import Fix, Problem, shown_value

_KEY = "layout.cuda_graphs"
_OFF: Fix = {_KEY: False}


def cuda_graph_layout_problems(layout: Layout, *, has_experts: bool) -> Iterator[Problem]:
    """Yield what of a layout, and whether of the model, a graph cannot hold."""
    if not layout.cuda_graphs:
        return
    if layout.num_ranks > 1:
        yield Problem(
            f"{_KEY} = true captures a step of one rank, and the layout has {layout.num_ranks}: collectives in "
            "captured graphs have been run on no machine",
            [_OFF],
        )
    if has_experts:
        yield Problem(f"{_KEY} = true: a mixture of experts counts its tokens on the host in each forward", [_OFF])
    for key, is_ruled_out, default, why in _rules(layout):
        if is_ruled_out:
            value = shown_value(getattr(layout, key))
            yield Problem(f"{_KEY} = true: {why} (layout.{key} = {value})", [_OFF, {f"layout.{key}": default}])


def _rules(layout: Layout) -> Iterator[tuple[str, bool, Any, str]]:
    """Yield (key, whether its value is ruled out, a value that is not, why)."""
    moves = "copies between the memories of the host and the device wait on the host"
    yield "cpu_offload", layout.cpu_offload, False, moves
    yield "activation_offload", layout.activation_offload, False, moves
    recomputes = "recomputation saves the state of random generators, which the host reads"
    yield "activation_checkpoint", layout.activation_checkpoint != "none", "none", recomputes
    blocks = layout.activation_checkpoint_blocks
    yield "activation_checkpoint_blocks", blocks is not None and layout.recomputes, None, recomputes
    is_sparse = layout.attention_backend in SPARSE_BACKENDS
    yield "attention_backend", is_sparse, "auto", "this backend makes its mask on the host in each forward"


def cuda_graph_problems(float8: Float8Recipe, optimizer: OptimizerSection, layout: Layout) -> Iterator[Problem]:
    """Yield what of a job, other than its layout, a graph cannot hold."""
    if not layout.cuda_graphs:
        return
    gradients = (
        "adds gradients to buffers that live through a step, so optimizer.in_backward = true would free none of them"
    )
    yield from one_graph_problems(f"{_KEY} = true", "reads", gradients, _OFF, float8, optimizer)
