"""What a rank holds of each parameter between steps: the parameter, its gradient, its optimizer state.

    parameters sharded (FSDP2)   float32 parameter, gradient and two moments, dim 0 padded to the ranks that share it
                                 (Muon: one, for a matrix of a block); moments may be bfloat16, or int8 in such matrices
    optimizer sharded (ZeRO-1)   16-bit parameter, gradient as microbatches add to it, next to which a microbatch's own
                                 stands unless backward adds to it directly; float32 master and two moments over all
                                 data-parallel ranks
    nothing sharded (DDP)        the same, all whole

What is frozen has neither gradient nor optimizer state, nor a float32 master. Whole, it is in the format that matmuls
read; FSDP2 keeps the shards of a unit in one format, which is that of what is trained. Either may have 8 or 4 bits.

tp divides what Matmul.tensor_split says, the embedding and the head along the vocabulary; ep and etp divide experts.
Where a workload computes in 32 bits or more no master is kept. Ignored: buffers, and padding of anything but dim 0.

FSDP2 splits dim 0 of every parameter, after tp, and gives each rank as many rows as the first: shards x ceil(rows /
shards) rows are gathered, so that with more ranks than rows most of what travels is padding. Source: FSDP2's own shards
(torch.distributed.fsdp), which a traced step shows to be so. Ignored: experts, which are cut in a dim that divides
evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from meshwright.cost.layout_table import Bools, Floats, Ints, LayoutTable
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import ModelSpec
from meshwright.spec.model.op import (
    KEPT_WEIGHT_BYTES,
    CoreAttention,
    Embedding,
    GroupedMatmul,
    Head,
    Matmul,
    Norm,
    Op,
)
from meshwright.spec.step.simulation_report import PaddedParameter, Padding
from meshwright.spec.step.stack import Stack
from meshwright.spec.step.workload import BYTES_PER_ELEMENT, Workload

_FLOAT32_BYTES = 4.0
_MOMENTS = 2.0
_BFLOAT16_BYTES = 2.0
_INT8_BYTES = 1.0 + 4.0 / 128
"""A code, and a float32 scale for each 128. Only matrices of blocks have codes."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one parameter's element: kept whole on the ranks that tp and ep leave, or shared by data parallelism."""

    whole_parameter: float
    whole_gradient: float
    shared_parameter: float
    shared_gradient: float
    shared_optimizer: float
    """All that the optimizer keeps."""
    shared_matrix_optimizer: float
    """The same of a matrix of a block."""


def state_bytes(workload: Workload, stack: Stack) -> StateBytes:
    """Return the bytes of each state; under "none" what is shared is shared by one rank."""
    wide = max(_FLOAT32_BYTES, float(workload.activation_element_bytes))
    moments, of_matrix = _moment_bytes(workload, wide)
    if stack.sharding == "parameters":
        return StateBytes(0.0, 0.0, wide, wide, moments, of_matrix)
    element = float(workload.activation_element_bytes)
    master = _FLOAT32_BYTES if element < _FLOAT32_BYTES else 0.0
    # float16 gradients add up as they are: what loss scaling keeps in range, a sum of few microbatches is too.
    adds_wide = workload.activation_dtype != "float16"
    gradient = max(element, float(BYTES_PER_ELEMENT[stack.gradient_accumulation_dtype])) if adds_wide else element
    if not stack.fuses_gradient_sum and gradient > element:
        gradient += element
    return StateBytes(element, gradient, 0.0, 0.0, master + moments, master + of_matrix)


def _moment_bytes(workload: Workload, wide: float) -> tuple[float, float]:
    """Return the bytes of the moments of an element, and of one in a matrix of a block."""
    moment = _BFLOAT16_BYTES if workload.optimizer_state_dtype == "bfloat16" else wide
    if workload.optimizer_state_dtype == "int8":
        return _MOMENTS * moment, _MOMENTS * _INT8_BYTES
    return _MOMENTS * moment, (1.0 if workload.optimizer == "muon" else _MOMENTS) * moment


@dataclass(frozen=True)
class Elements:
    """Parameters of some ops on one rank, one element a layout."""

    whole: Floats
    """After tp, ep and etp have divided them."""
    shared: Floats
    """After data-parallel ranks have, too."""
    trained_whole: Floats
    """Those of `whole` that have gradients."""
    trained_shared: Floats
    """Those of `shared`."""
    narrow_whole: Floats
    """Those of `whole` that are frozen in 8 or 4 bits."""
    narrow_shared: Floats
    """Those of `shared`."""
    narrow_whole_bytes: Floats
    narrow_shared_bytes: Floats

    @classmethod
    def of(cls, op: Op, whole: Floats, shared: Floats, frozen_bytes: float | None) -> Elements:
        """Return those of `op`, which has so many, of `frozen_bytes` where it is a frozen matmul in low precision."""
        trained = op.num_trained_parameters / op.num_parameters if op.num_parameters else float(not op.is_frozen)
        is_low = isinstance(op, Matmul | GroupedMatmul) and op.is_frozen and op.part != "router"
        kept = frozen_bytes if is_low and not getattr(op, "is_wide", False) else None
        narrow_bytes = KEPT_WEIGHT_BYTES.get(op.weights, kept)
        is_narrow, size = float(narrow_bytes is not None), narrow_bytes or 0.0
        narrow = whole * is_narrow, shared * is_narrow, whole * size, shared * size
        return cls(whole, shared, whole * trained, shared * trained, *narrow)

    @classmethod
    def none(cls, layouts: LayoutTable) -> Elements:
        """Return no elements at all."""
        return cls(*(np.zeros(len(layouts)) for _ in fields(cls)))

    def __add__(self, other: Elements) -> Elements:
        return self._with(other, np.add)

    def __mul__(self, factor: Floats | Ints | Bools) -> Elements:
        return Elements(*(getattr(self, part.name) * factor for part in fields(self)))

    def maximum(self, other: Elements) -> Elements:
        """Return the larger of both, layout by layout."""
        return self._with(other, np.maximum)

    def where(self, is_this: Bools, other: Elements) -> Elements:
        """Return these where `is_this`, else those of `other`."""
        return self._with(other, lambda here, there: np.where(is_this, here, there))

    def _with(self, other: Elements, function: Callable[[Floats, Floats], Floats]) -> Elements:
        names = [part.name for part in fields(self)]
        return Elements(*(function(getattr(self, name), getattr(other, name)) for name in names))


def frozen_bytes(workload: Workload, stack: Stack) -> float | None:
    """Return the bytes of a frozen weight of a low-precision matmul: kernels that are written for it keep what they
    have rounded, scales of 4 bits included. None where they keep what it was made from.
    """
    low = {"float8": 1.0, "float4": 0.5 + 1 / 16} if stack.kernels == "fused" else {}
    return low.get(workload.matmul_dtype)


def elements_of(
    ops: tuple[Op, ...],
    layouts: LayoutTable,
    stack: Stack,
    *,
    has_copy: bool = False,
    frozen_bytes: float | None = None,
) -> Elements:
    """Return the parameters of `ops` on one rank; with `has_copy` a tied head holds the embedding's weights again.

    `frozen_bytes` are those of a frozen weight of a low-precision matmul, where that has a format of its own.
    """
    total = Elements.none(layouts)
    for op in ops:
        if op.num_parameters or (has_copy and isinstance(op, Head)):
            total = total + Elements.of(op, *_divided(op, layouts, stack), frozen_bytes)
    return total


def _divided(op: Op, layouts: LayoutTable, stack: Stack) -> tuple[Floats, Floats]:
    """Return the weights of `op` that a rank has whole, and after data-parallel ranks have divided them."""
    if isinstance(op, GroupedMatmul):
        whole = op.num_parameters / (layouts.ep * layouts.etp)
        if stack.sharding == "none":
            return whole, whole
        if stack.sharding == "parameters":
            return whole, whole / np.maximum(layouts.expert_dp_shard, 1)
        ranks = layouts.fsdp * layouts.dp_replicate * layouts.tp / (layouts.ep * layouts.etp)
        return whole, whole / np.maximum(ranks, 1)
    rows, width, is_split = weight_shape(op)
    split = layouts.tp if is_split else np.ones_like(layouts.tp)
    # tp cuts dim 1 of a matmul whose input it divides, and dim 0 of the others.
    is_cut_across = isinstance(op, Matmul) and op.tensor_split == "rows"
    dim_0 = np.ceil(rows / np.where(is_cut_across, 1, split))
    dim_1 = np.ceil(width / np.where(is_cut_across, split, 1))
    whole = dim_0 * dim_1
    if stack.sharding == "none":
        return whole, whole
    if stack.sharding == "parameters":
        return whole, np.ceil(dim_0 / layouts.fsdp) * dim_1
    return whole, whole / (layouts.fsdp * layouts.dp_replicate)


def weight_shape(op: Op) -> tuple[int, int, bool]:
    """Return (dim 0, dim 1, whether tp divides it) of an op's weight."""
    if isinstance(op, Matmul):
        return op.out_features, op.in_features, op.tensor_split != "none"
    if isinstance(op, Embedding | Head):
        return op.vocab_size, op.dim, True
    if isinstance(op, CoreAttention):
        return op.num_heads, 1, True
    assert isinstance(op, Norm), f"{op.kind} has parameters"
    return op.width, 1, False


_STATE_BYTES = 16
"""Of one parameter's element between steps: float32 parameter, gradient and two moments."""
_LEAST_FACTOR = 1 + 0.1
"""Parameters that padding lengthens by less than a tenth are not listed."""


def padding_of(model: ModelSpec, layout: Layout, gathered_bytes: int) -> Padding | None:
    """Return what padding costs where an element of `gathered_bytes` is gathered; None where nothing is padded."""
    gathered = needed = state = 0
    parameters = []
    for group in model.distinct_groups:
        for op in group.ops:
            if isinstance(op, GroupedMatmul) or not op.num_parameters:
                continue
            rows, width = _part(op, layout)
            padded = math.ceil(rows / layout.fsdp) * layout.fsdp
            gathered += group.count * padded * width
            needed += group.count * rows * width
            state += group.count * (padded - rows) * width * _STATE_BYTES // layout.fsdp
            wasted = group.count * (padded - rows) * width * gathered_bytes
            name = ".".join(part for part in (group.name, op.name) if part)
            parameters.append(PaddedParameter(name=name, rows=rows, wire_factor=padded / rows, wasted_bytes=wasted))
    if gathered == needed:
        return None
    parameters.sort(key=lambda one: -one.wasted_bytes)
    return Padding(
        num_shards=layout.fsdp,
        wire_factor=gathered / needed,
        wasted_state_bytes=state,
        parameters=tuple(one for one in parameters if one.wire_factor >= _LEAST_FACTOR),
    )


def _part(op: Op, layout: Layout) -> tuple[int, int]:
    """Return dim 0 of what tensor parallelism leaves of an op's weight, and the elements of each of its rows."""
    rows, width, is_split = weight_shape(op)
    if not is_split:
        return rows, width
    is_cut_across = isinstance(op, Matmul) and op.tensor_split == "rows"
    return (rows, math.ceil(width / layout.tp)) if is_cut_across else (math.ceil(rows / layout.tp), width)
