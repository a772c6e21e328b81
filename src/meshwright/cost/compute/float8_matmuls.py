"""Which matmuls of our own trainer are in float8, and what rounding their operands moves and launches.

Bytes of an element (parallelism/float8/float8_linear.py; e of precision.compute):

                    one operator at a time                                         compiled
    amax            e                                                              e, or nothing where what makes it
                                                                                   finds it, too: of x, and of rows
    rounding        cast to float32; scaled, clamped, cast to 8 bits               e + 1
    another order   2, copied, for the operands of backward                        2 for w, else none

    forward    x; rowwise also w
    backward   g and x; rowwise g again for the other matmul, and w; copies of w, g and x; one operator at a time,
               products of rowwise matmuls are scaled apart by a matrix in float32

tensorwise: w arrives in float8, and x keeps its scale. rowwise_with_gw_hp: the gradient of w is a product of 16 or 32
bits. Compiled layers that read the same x round it once. Checked against traced steps on torch 2.13 and torchao 0.18,
2026-11-26. What rounds shards of weights before they are gathered: fsdp_copies.py. Ignored: what finds their amax once
a step, 4 bytes a parameter of a rank; scales.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Bools, Floats, Passes
from meshwright.cost.training_setup import Partition
from meshwright.spec.model.op import FLOAT8_ALIGNMENT, GroupedMatmul, Matmul, Op, float8_alignment

_LOW, _FLOAT32 = 1.0, 4.0
ROUNDED_FLOAT32_BYTES = 5 * _FLOAT32 + _LOW
"""Of an element in float32: scaled, clamped and cast, a kernel each."""
_MX_BYTES, _MX_COMPILED_BYTES = fixed_constant("mx_rounding_bytes.eager"), fixed_constant("mx_rounding_bytes.compiled")
"""Of an element that becomes one of MXFP8."""


class _Sizes(NamedTuple):
    """Elements of one linear layer's tensors on a rank."""

    inputs: Floats
    outputs: Floats
    weights: Floats
    is_first: bool
    """Whether no layer before it reads the same input."""


def takes_low_precision(op: Matmul | GroupedMatmul, outputs: Floats, inputs: Floats, partition: Partition) -> Bools:
    """Return where a matmul with a weight (outputs, inputs) on a rank is computed in the workload's low precision.

    Ours leave out what kernels do not take, and experts that are not asked for (parallelism/float8/convert_linears.py).
    """
    alignment = float8_alignment(partition.own_float8)
    if isinstance(op, GroupedMatmul):
        alignment = FLOAT8_ALIGNMENT
    is_aligned = (np.mod(outputs, alignment) == 0) & (np.mod(inputs, alignment) == 0)
    is_ours = op.part != "router" if isinstance(op, Matmul) else partition.own_float8_experts
    is_wide = isinstance(op, Matmul) and op.is_wide
    return np.asarray(~np.array(is_wide) & (~np.array(partition.is_own) | (is_ours & is_aligned)), np.bool_)


def features_of_rank(op: Matmul, partition: Partition) -> tuple[Floats, Floats]:
    """Return the output and input features of a linear layer on one rank."""
    one = np.ones_like(partition.tokens)
    outputs = op.out_features / (partition.tp if op.tensor_split == "columns" else one)
    return outputs, op.in_features / (partition.tp if op.tensor_split == "rows" else one)


def low_parameters(op: Op, partition: Partition) -> Floats:
    """Return the weights of `op` on a rank that our trainer gathers in float8."""
    if not isinstance(op, Matmul) or not partition.gathers_own_low:
        return np.zeros_like(partition.tokens)
    outputs, inputs = features_of_rank(op, partition)
    return np.where(takes_low_precision(op, outputs, inputs, partition), outputs * inputs, 0.0)


def casts_of(ops: Sequence[Op], kernels: str, partition: Partition) -> Passes:
    """Return the elements of 16 or 32 bits that our rounding moves in a block, forward and backward."""
    forward, backward = np.zeros_like(partition.tokens), np.zeros_like(partition.tokens)
    before: Matmul | None = None
    for op in ops if partition.own_float8 else ():
        if isinstance(op, Matmul):
            outputs, inputs = features_of_rank(op, partition)
            is_low = takes_low_precision(op, outputs, inputs, partition)
            tokens = partition.tokens_between if op.tensor_split == "none" else partition.tokens
            is_first = kernels == "eager" or before is None or not _reads_the_same(before, op)
            sizes = _Sizes(tokens * inputs, tokens * outputs, outputs * inputs, is_first)
            moved = _eager_bytes(sizes, partition) if kernels == "eager" else _compiled_bytes(sizes, partition)
            forward = forward + is_low * moved[0] / partition.element_bytes
            backward = backward + is_low * moved[1] / partition.element_bytes
            before = op
        elif isinstance(op, GroupedMatmul) and partition.own_float8_experts:
            moved = _expert_bytes(op, partition)
            forward = forward + moved[0] / partition.element_bytes
            backward = backward + moved[1] / partition.element_bytes
    return forward, backward


def _reads_the_same(before: Matmul, op: Matmul) -> bool:
    is_alike = (before.part, before.in_features) == (op.part, op.in_features)
    return is_alike and before.tensor_split == op.tensor_split == "columns"


def _expert_bytes(op: GroupedMatmul, partition: Partition) -> Passes:
    """Return the bytes that rounding one grouped matmul's rows and weights moves, forward and backward."""
    outputs, inputs, rows = _expert_sizes(op, partition)
    element, is_eager = partition.element_bytes, partition.has_eager_experts
    rounded = ROUNDED_FLOAT32_BYTES + (element + _FLOAT32 if element < _FLOAT32 else 0.0)
    each = np.where(is_eager, element + rounded, 2 * element + _LOW)
    # Compiled, the rows that gate and up read are rounded once.
    is_first = np.where(is_eager | (op.name.rpartition(".")[2] != "up"), 1.0, 0.0)
    weights = op.num_experts / partition.ep * outputs * inputs
    # Backward reads weights along the other dim: a copy one operator at a time.
    copied = np.where(is_eager, 2 * element, 0.0)
    is_low = takes_low_precision(op, outputs, inputs, partition)
    forward = each * (rows * inputs * is_first + weights)
    return is_low * forward, is_low * (each * (rows * outputs + weights) + copied * weights)


def _expert_sizes(op: GroupedMatmul, partition: Partition) -> tuple[Floats, Floats, Floats]:
    """Return an expert's output and input features on one rank, and the rows of all of the rank's experts."""
    one = np.ones_like(partition.tokens)
    outputs = op.out_features / (partition.etp if op.tensor_split == "columns" else one)
    inputs = op.in_features / (partition.etp if op.tensor_split == "rows" else one)
    return outputs, inputs, partition.tokens / partition.tp * partition.etp * op.experts_per_token


def num_low_experts(ops: Sequence[Op], partition: Partition) -> Floats:
    """Return the grouped matmuls of a block that our trainer computes in float8."""
    found = np.zeros_like(partition.tokens)
    for op in ops if partition.own_float8_experts else ():
        if isinstance(op, GroupedMatmul):
            found = found + takes_low_precision(op, *_expert_sizes(op, partition)[:2], partition)
    return found


def num_low_matmuls(ops: Sequence[Op], partition: Partition) -> Floats:
    """Return the linear layers of a block that our trainer computes in float8."""
    found = np.zeros_like(partition.tokens)
    for op in ops if partition.own_float8 else ():
        if isinstance(op, Matmul):
            found = found + takes_low_precision(op, *features_of_rank(op, partition), partition)
    return found


def _eager_bytes(sizes: _Sizes, partition: Partition) -> Passes:
    element = partition.element_bytes
    # A cast to float32 of what is float32 is none.
    rounded = ROUNDED_FLOAT32_BYTES + (element + _FLOAT32 if element < _FLOAT32 else 0.0)
    scaled, copied = element + rounded, 2 * _LOW
    x, g, w = sizes.inputs, sizes.outputs, sizes.weights
    if partition.own_float8 == "mxfp8":
        turned = 2 * element
        return _MX_BYTES * (x + w), _MX_BYTES * (2 * g + x + w) + turned * (g + x + w)
    if partition.own_float8 == "float8-tensorwise":
        return scaled * x, scaled * g + rounded * x + copied * (x + g + w)
    # The matrix of scales is written, and read with the product, which is written again.
    post = 2 * _FLOAT32 + 2 * element
    forward, backward = scaled * (x + w), scaled * (g + w) + copied * w + post * x
    if partition.own_float8 == "float8-rowwise":
        backward = backward + scaled * (g + x) + copied * (g + x) + post * w
    return forward, backward


def _compiled_bytes(sizes: _Sizes, partition: Partition) -> Passes:
    element, copied = partition.element_bytes, 2 * _LOW
    rounded = element + _LOW
    scaled = element + rounded
    x, g, w = sizes.inputs * sizes.is_first, sizes.outputs, sizes.weights
    if partition.own_float8 == "mxfp8":
        return _MX_COMPILED_BYTES * (x + w), _MX_COMPILED_BYTES * (2 * g + x + w)
    if partition.own_float8 == "float8-tensorwise":
        return rounded * x, scaled * g + rounded * x + copied * w
    forward, backward = rounded * (x + w), rounded * g + scaled * w + copied * w
    if partition.own_float8 == "float8-rowwise":
        backward = backward + scaled * (g + x)
    return forward, backward
