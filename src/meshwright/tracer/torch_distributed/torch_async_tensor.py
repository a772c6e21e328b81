"""Asynchronous tensor parallelism under the tracer: matmuls fused with their collectives by torch's compiler pass.

On CUDA a fused operation runs its matmul in one part for each rank on two streams, whose kernels fill each other's last
waves, while copy engines move the other parts (torch.distributed._symmetric_memory). Each is recorded as its
overlapping parts, with two matmuls:

    all-gather + matmul       the own part, concurrent with the all-gather, with all but one of the others; the last one
    matmul + reduce-scatter   the first part; the others, concurrent with the reduce-scatter; the sum of the results

The total is the slower of the two plus one part of the other. Private parts of torch, checked in 2.13. Ignored:
barriers between the parts; that copy engines leave the SMs to the matmul.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch import distributed as dist
from torch._ops import OpOverload
from torch.distributed import _symmetric_memory  # noqa: F401  (defines the joint operations)
from torch.distributed.distributed_c10d import _get_group_size_by_name

from meshwright.errors import UnsupportedError
from meshwright.parallelism.torch_private import torch_compiler
from meshwright.tracer.torch_patches.torch_names import JOINS_ALIKE, replace

JOINT_AXIS = "(symmetric memory)"
"""Suffix of the axis of a group whose ranks read each other's memory by copy engines, not NCCL."""
_collectives = torch.ops._c10d_functional


def allow_async_tensor_parallel(device_type: str) -> None:
    """Make the runtime assume symmetric memory on a simulated device, permanently."""
    replace(torch_compiler, "has_symmetric_memory", lambda _: lambda asked: asked in ("cuda", device_type))


def join_matmuls(graph: fx.GraphModule) -> None:
    """Fuse matmuls with their collectives in place, as the compiler does with layout.async_tp."""
    if not torch._inductor.config._micro_pipeline_tp:
        return
    if not torch.__version__.startswith(JOINS_ALIKE):
        raise UnsupportedError(
            f"torch {torch.__version__} fuses other matmuls and collectives than torch {JOINS_ALIKE}, the version that "
            f"a simulation supports: install torch {JOINS_ALIKE}, or set layout.async_tp to false"
        )
    # Imported here: it takes seconds, and only compiled jobs need it.
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass  # noqa: PLC0415
    from torch._inductor.fx_passes.post_grad import view_to_reshape  # noqa: PLC0415

    view_to_reshape(graph)
    # Without CUDA in the build the pass does nothing.
    with mock.patch.object(dist, "is_nccl_available", return_value=True):
        micro_pipeline_tp_pass(graph.graph)
    for node in graph.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
    graph.recompile()


def _gather_matmul(
    shard: Tensor, weights: Sequence[Tensor], gather_dim: int, group_name: Any, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """Return (the gathered tensor, its products with `weights`), with the gathered dim outermost in memory."""
    num_ranks = _get_group_size_by_name(group_name)
    outer = shard.movedim(gather_dim, 0)
    own = outer.reshape(-1, outer.shape[-1])
    num_rows, num_last = num_ranks * len(own), len(own)
    pending = _collectives.all_gather_into_tensor(own, num_ranks, group_name)
    products = [own.new_empty((num_rows, weight.shape[1])) for weight in weights]
    # Rows that have arrived by then, separate from those still in flight.
    arrived = own.as_strided((num_rows - num_last, own.shape[1]), (0, 1))
    for weight, product in zip(weights, products, strict=True):
        torch.mm(arrived, weight, out=product[:-num_last])
    gathered = _collectives.wait_tensor(pending)
    for weight, product in zip(weights, products, strict=True):
        torch.mm(gathered[-num_last:], weight, out=product[-num_last:])

    def shaped(rows: Tensor) -> Tensor:
        return rows.view(num_ranks * outer.shape[0], *outer.shape[1:-1], -1).movedim(0, gather_dim)

    return shaped(gathered) if return_A else None, [shaped(product) for product in products]


def _matmul_scatter(x: Tensor, weight: Tensor, reduce_op: str, scatter_dim: int, group_name: Any) -> Tensor:
    """Return this rank's part along `scatter_dim` of the sum over ranks of `x` @ `weight`."""
    num_ranks = _get_group_size_by_name(group_name)
    outer = x.movedim(scatter_dim, 0)
    rows = outer.reshape(-1, outer.shape[-1])
    num_first = len(rows) // num_ranks
    partials = rows.new_empty((len(rows), weight.shape[1]))
    first = torch.mm(rows[:num_first], weight)
    # Parts are sent as they are computed, separate from those written next.
    sent = first.as_strided(partials.shape, (0, 1))
    pending = _collectives.reduce_scatter_tensor(sent, reduce_op, num_ranks, group_name)
    torch.mm(rows[num_first:], weight, out=partials[num_first:])
    _collectives.wait_tensor(pending)
    summed = partials.view(num_ranks, outer.shape[0] // num_ranks, *outer.shape[1:-1], -1).sum(0)
    return summed.movedim(0, scatter_dim)


JOINT: Mapping[OpOverload, Callable[..., Any]] = {
    torch.ops.symm_mem.fused_all_gather_matmul.default: _gather_matmul,
    torch.ops.symm_mem.fused_matmul_reduce_scatter.default: _matmul_scatter,
}
"""By operator the function that runs its parts; no 8-bit matmuls: our float8 blocks gather separately."""
