"""Parameters of an op on one rank, before data-parallel ranks share them: tp divides most, ep and etp experts."""

import numpy as np

from meshwright.cost.layout_table import Floats
from meshwright.cost.training_setup import Partition
from meshwright.spec.model.op import (
    NARROW_WEIGHT_BYTES,
    CoreAttention,
    Embedding,
    GroupedMatmul,
    Head,
    Matmul,
    Op,
)


def dense_parameters_of(op: Op, partition: Partition) -> Floats:
    """Return those that are not experts'."""
    if isinstance(op, GroupedMatmul):
        return np.zeros_like(partition.tokens)
    return op.num_parameters / (partition.tp if is_split(op) else np.ones_like(partition.tokens))


def trained_dense_parameters_of(op: Op, partition: Partition) -> Floats:
    """Return those of them that have gradients."""
    if isinstance(op, GroupedMatmul):
        return np.zeros_like(partition.tokens)
    return op.num_trained_parameters / (partition.tp if is_split(op) else np.ones_like(partition.tokens))


def cast_frozen_parameters_of(op: Op, partition: Partition) -> Floats:
    """Return the frozen weights of `op` that are kept in the usual format."""
    if op.weights != "frozen":
        return np.zeros_like(partition.tokens)
    whole = op.num_parameters - op.num_trained_parameters
    experts = partition.ep * partition.etp * np.ones_like(partition.tokens)
    return whole / (experts if isinstance(op, GroupedMatmul) else partition.tp ** float(is_split(op)))


def narrow_gather_bytes_of(op: Op, partition: Partition) -> Floats:
    """Return the bytes that gathering a frozen weight of 8 or 4 bits is less than gathering it in the usual format."""
    if not (isinstance(op, Matmul | GroupedMatmul) and op.weights in NARROW_WEIGHT_BYTES):
        return np.zeros_like(partition.tokens)
    usual = 1.0 if partition.gathers_low else partition.element_bytes
    experts = partition.ep * partition.etp * np.ones_like(partition.tokens)
    split = experts if isinstance(op, GroupedMatmul) else partition.tp ** float(is_split(op))
    return np.asarray(max(usual - NARROW_WEIGHT_BYTES[op.weights], 0.0) * op.num_parameters / split)


def num_tensors_of(op: Op) -> int:
    """Return the parameters of `op` as tensors; a tied head counts, since a pipeline's last stage has a copy."""
    return (op.num_parameters > 0 or isinstance(op, Head)) * (1 + getattr(op, "has_bias", False))


def num_trained_tensors_of(op: Op) -> int:
    """Return those of them that have gradients."""
    return int(getattr(op, "trains_row_norms", False)) if op.is_frozen else num_tensors_of(op)


def is_split(op: Op) -> bool:
    """Return whether tp ranks divide the parameters of `op`."""
    return isinstance(op, Embedding | Head | CoreAttention) or (isinstance(op, Matmul) and op.tensor_split != "none")
