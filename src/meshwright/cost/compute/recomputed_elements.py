"""recomputed_elements: what a compiled block of our own trainer moves more where it recomputes all of its forward.

Recomputation and backward are one graph, whose kernels of backward make what they read again as they read it:

    norms                  as forward; the residual sum before one is read in its parts, here and in backward
    rope                   as forward
    activations            written once more, by the kernel of backward that reads their factors anyway
    adapters' sums         a term more for each kernel that reads one; as forward where attention reads it as it is
    DoRA's factors         as forward
    last residual sum      nothing: it is what the next block keeps

Kernels are those of forward without the activation's and the last sum's. A frozen weight of 8 or 4 bits is made wide
once for both, where eager code does it in recomputation and in backward: the products read the same tensor.

Counted in traced steps of llama3-8b, plain, with LoRA and with DoRA, on torch 2.13, 2026-11-28. Mixtures and blocks
around eager attention are compiled in parts, each of which repeats all of its forward.
"""

from collections.abc import Sequence

import numpy as np

from meshwright.cost.compute.own_elements import elements_moved, gain_passes, lone_sums
from meshwright.cost.layout_table import Floats
from meshwright.cost.training_setup import Partition
from meshwright.spec.model.op import CoreAttention, Elementwise, GroupedMatmul, Op

_RESIDUAL = 2.0
_KERNELS_LEFT_OUT = 2.0


def recomputed_elements(ops: Sequence[Op], partition: Partition) -> Floats:
    """Return the elements that one microbatch's tokens move more, one element a key; NaN where no graph of ours on a
    device holds recomputation and backward of a whole block.
    """
    is_block = any(isinstance(op, CoreAttention) for op in ops)
    if not (is_block and partition.is_own_on_device and partition.compiles_blocks):
        return np.full_like(partition.tokens, np.nan)
    if any(isinstance(op, GroupedMatmul) for op in ops):
        return np.full_like(partition.tokens, np.nan)
    moved = 2 * lone_sums(ops, partition)
    last_residual = max((i for i, op in enumerate(ops) if _has_role(op, "residual")), default=-1)
    for number, op in enumerate(ops):
        if number != last_residual:
            moved = moved + _moved_again(op, ops, partition)
    return np.where(partition.compiles_only_networks, np.nan, moved)


def kernels_left_out(forward: Floats) -> Floats:
    """Return what of the kernels of a block's `forward` such recomputation launches."""
    return np.maximum(forward - _KERNELS_LEFT_OUT, 0)


def _has_role(op: Op, *roles: str) -> bool:
    return isinstance(op, Elementwise) and op.role in roles


def _moved_again(op: Op, ops: Sequence[Op], partition: Partition) -> Floats:
    forward, _ = elements_moved(op, "compiled", partition)
    if not isinstance(op, Elementwise):
        return forward
    tokens = partition.tokens / partition.tp
    if op.role == "residual":
        return np.asarray(_RESIDUAL * op.writes_per_token * partition.tokens_between)
    if op.role in ("activation", "gated_activation", "adapter_sum"):
        return np.asarray(op.writes_per_token * tokens)
    if op.role == "adapter_gain":
        return np.asarray(gain_passes(op, ops)[0] * op.writes_per_token * tokens)
    return forward
