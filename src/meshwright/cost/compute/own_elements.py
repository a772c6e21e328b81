"""own_elements: what the elementwise kernels of our own trainer read and write in a block, forward and backward.

                  one operator at a time, as around blocks       compiled
    norm          2 and 3 vectors                                2 and 3
    residual      3 and 3                                        3 and 4
    rope          26 and 26 of what is turned: in float32        2 and 2; and for either the tables, in float32
    swiglu        5 and 9 widths                                 3 and 5
    others        reads and writes; backward writes once more    the same
    sums          3 in backward                                  1, where they are read
    biases        1 in backward: the sum of a gradient over tokens
    adapters      3 forward for each sum                         1 where a kernel reads it that runs anyway, else 3
    embedding     2 forward; backward reads a gradient and writes the whole table, unless that is frozen; under tp
                  foreign tokens are masked

Sums are of the gradients that matmuls give the tensor they all read: under tp of the whole sequence, before it is
scattered. Mixtures of experts operator by operator (models/moe.py where it is not compiled):

    rows          K of each token, D wide: taken from tokens, padded (zeros, then rows), back out of padding, into the
                  tokens' order, weighed, summed; with ep also into the experts' order and out of it
    width         K F of each token: activation and product, with the activation recomputed in backward
    router        its input, cast to float32

Counted in traced steps of Llama and GPT-2 on torch 2.13, 2026-11-23, in elements of 16-bit activations, as op_time.py
prices operators. Ignored: what latent attention joins and splits; indices, and rows of padding.
"""

from collections.abc import Sequence

import numpy as np

from meshwright.cost.compute.float8_matmuls import casts_of
from meshwright.cost.layout_table import Floats, Passes
from meshwright.cost.training_setup import Partition
from meshwright.spec.model.op import CoreAttention, Elementwise, Embedding, GroupedMatmul, Matmul, Norm, Op, Rope

_ROW_PASSES = (12.0, 19.0)
"""Reads and writes of all rows, forward and backward: 2 for a gather, 3 where zeros are written first, 3 for a product
or for the sum of two gradients."""
_EXCHANGE_PASSES = 4.0
_WIDTH_PASSES = (5.0, 11.0)
_ROUTER_PASSES = (3.0, 6.0)
"""A cast from 16 bits to 32, backward also the sum of the gradients that the router and the rows give a token."""


def is_eager(ops: Sequence[Op], partition: Partition) -> Floats:
    """Return 1 where a block of `ops` has a mixture that runs operator by operator, else 0, one element a key."""
    has_experts = any(isinstance(op, GroupedMatmul) for op in ops)
    return np.where(partition.has_eager_experts & has_experts, 1.0, 0.0)


def eager_elements(ops: Sequence[Op], partition: Partition) -> Passes:
    """Return what one microbatch's tokens move, forward and backward; 0 where the mixture is compiled."""
    grouped = [op for op in ops if isinstance(op, GroupedMatmul)]
    if not grouped:
        return 0.0 * partition.tokens, 0.0 * partition.tokens
    first = grouped[0]
    copies, dim, width = first.experts_per_token, first.in_features, first.out_features / partition.etp
    tokens = partition.tokens / partition.tp * partition.etp * is_eager(ops, partition)
    exchange = np.where(partition.ep > 1, _EXCHANGE_PASSES, 0.0)

    def moved(rows: float, widths: float, router: float) -> Floats:
        return np.asarray(tokens * (copies * dim * (rows + exchange) + copies * width * widths + dim * (1 + router)))

    forward, backward = zip(_ROW_PASSES, _WIDTH_PASSES, _ROUTER_PASSES, strict=True)
    return moved(*forward), moved(*backward)


_NORM = (2.0, 3.0)
_RESIDUAL = {"compiled": (3.0, 4.0), "eager": (3.0, 3.0)}
_ROPE = {"compiled": (2.0, 2.0), "eager": (26.0, 26.0)}
_ROPE_TABLES = 8.0
"""Cosine and sine, two elements of 16 bits each, read for queries and again for keys."""
_SWIGLU = {"compiled": (3.0, 5.0), "eager": (5.0, 9.0)}
_SUM = {"compiled": 1.0, "eager": 3.0}
_MASK = 2.0
_SUM_OF_ADAPTER = {"compiled": 1.0, "eager": 3.0}
_GAIN = {"compiled": (2.0, 4.0), "eager": (2.0, 6.0)}
"""Of DoRA's factors: backward the gradient times the factors (2) and times what they multiply (3), of which the sum is
read, where no kernel adds it up as it multiplies.
"""


def own_elements(ops: Sequence[Op], partition: Partition) -> Passes:
    """Return the elements that one microbatch's tokens move forward and backward; 0 where the software is another."""
    is_block = any(isinstance(op, CoreAttention) for op in ops)
    if not (is_block and partition.compiles_blocks):
        forward, backward = _elements(ops, "eager", "eager", partition)
    else:
        forward, backward = _elements(ops, "compiled", "compiled", partition)
        if partition.compiles_only_networks.any():
            of_networks = _elements(ops, "eager", "compiled", partition)
            forward, backward = (
                np.where(partition.compiles_only_networks, some, all_of_it)
                for some, all_of_it in zip(of_networks, (forward, backward), strict=True)
            )
    return forward * float(partition.is_own), backward * float(partition.is_own)


def _elements(ops: Sequence[Op], kernels: str, of_networks: str, partition: Partition) -> Passes:
    """Return the elements that a block's `kernels` move, and those inside of its networks, `of_networks`."""
    replaced = is_eager(ops, partition)
    forward, backward = 0.0 * partition.tokens, 0.0 * partition.tokens
    for op in ops:
        share = 1 - replaced * (isinstance(op, Elementwise) and op.part == "experts")
        own_kernels = of_networks if _is_inside_network(op) else kernels
        op_forward, op_backward = elements_moved(op, own_kernels, partition)
        if isinstance(op, Elementwise) and op.role == "adapter_gain":
            passes = gain_passes(op, ops) if own_kernels == "compiled" else _GAIN["eager"]
            op_forward, op_backward = _times(passes, op.writes_per_token * partition.tokens / partition.tp)
        forward, backward = forward + share * op_forward, backward + share * op_backward
    for inside in (False, True):
        own = [op for op in ops if _is_inside_network(op) == inside]
        cast_forward, cast_backward = casts_of(own, of_networks if inside else kernels, partition)
        # A network's graph alone has no reader of its sum to join it with.
        forward, backward = forward + cast_forward, backward + cast_backward + _SUM[kernels] * _summed(own, partition)
        forward = forward + (_SUM_OF_ADAPTER["eager"] - _SUM_OF_ADAPTER[kernels]) * lone_sums(own, partition)
    return forward, backward


def network_share(ops: Sequence[Op], partition: Partition) -> Floats:
    """Return the share of the elements moved in backward that a block's networks move, where only they are compiled;
    else 1.
    """
    if not partition.compiles_only_networks.any():
        return np.ones_like(partition.tokens)
    inside = [op for op in ops if _is_inside_network(op)]
    # The sum of what two graphs give is outside of both.
    own = (
        sum(elements_moved(op, "compiled", partition)[1] for op in inside) + casts_of(inside, "compiled", partition)[1]
    )
    whole = _elements(ops, "eager", "compiled", partition)[1]
    return np.where(partition.compiles_only_networks, own / np.maximum(whole, 1), 1.0)


def _is_inside_network(op: Op) -> bool:
    """Return whether an op of a block belongs to the module of its network, as norms and residual sums do not."""
    is_between = isinstance(op, Norm) or (isinstance(op, Elementwise) and op.role == "residual")
    return op.part != "attention" and not is_between


def elements_moved(op: Op, kernels: str, partition: Partition) -> Passes:
    """Return what `kernels`, compiled or eager, move for one op, forward and backward, but for DoRA's factors."""
    tokens, between, tp = partition.tokens, partition.tokens_between, partition.tp
    if isinstance(op, Norm):
        rows = between if op.input == "stream" else tokens / tp
        return _times(_NORM, op.width * op.vectors_per_token * rows)
    if isinstance(op, Rope):
        tables = _ROPE_TABLES * op.head_dim * tokens
        forward, backward = _times(_ROPE[kernels], op.num_heads * op.head_dim * tokens / tp)
        return forward + tables, backward + tables
    if isinstance(op, Embedding):
        masked = np.where(tp > 1, _MASK, 0.0) * op.dim * tokens
        looked_up = op.dim * tokens
        backward = looked_up + masked + op.vocab_size * op.dim / tp
        return 2 * looked_up + masked, backward * (not op.is_frozen)
    if isinstance(op, Elementwise):
        return _elementwise(op, kernels, partition)
    if isinstance(op, Matmul) and op.has_bias:
        # The bias' gradient is a sum over tokens.
        return 0.0 * tokens, op.out_features * tokens / (tp if op.tensor_split == "columns" else 1.0)
    return 0.0 * tokens, 0.0 * tokens


def _elementwise(op: Elementwise, kernels: str, partition: Partition) -> Passes:
    reads, writes = float(op.reads_per_token), float(op.writes_per_token)
    if op.role == "residual":
        return _times(_RESIDUAL[kernels], (reads + writes) / 3 * partition.tokens_between)
    if op.role == "gated_activation":
        return _times(_SWIGLU[kernels], writes * partition.tokens / partition.tp)
    if op.role == "adapter_sum":
        # Both of its terms get the gradient of the sum as it is.
        return _times((_SUM_OF_ADAPTER[kernels] * writes, 0.0), partition.tokens / partition.tp)
    if op.role == "adapter_gain":
        return 0.0 * partition.tokens, 0.0 * partition.tokens
    tokens = partition.tokens_between if op.role == "combine" else partition.tokens / partition.tp
    return _times((reads + writes, reads + 2 * writes), tokens)


def _summed(ops: Sequence[Op], partition: Partition) -> Floats:
    """Return the elements of all sums of two gradients: one less than column-parallel matmuls, and adapters of
    linear layers, read each tensor.
    """
    matmuls = [op for op in ops if isinstance(op, Matmul)]
    columns = [op for op in matmuls if op.adapter_matrix == "none" and op.tensor_split == "columns"]
    num_read = sum(op.adapter_matrix == "none" and op.tensor_split == "rows" for op in matmuls)
    width = columns[0].in_features if columns else 0
    total = max(len(columns) - num_read, 0) * width * partition.tokens
    for op in matmuls:
        if op.adapter_matrix == "A" and op.has_input_gradient:
            total = total + op.in_features * partition.tokens / (partition.tp if op.tensor_split == "rows" else 1.0)
    return total


def gain_passes(op: Op, ops: Sequence[Op]) -> tuple[float, float]:
    """Return the passes over the product with DoRA's factors in a compiled block, forward and backward: an activation
    multiplies as it reads, and so does a norm, which reads the sum with the residual stream.
    """
    after = [one for one in ops[ops.index(op) :] if getattr(one, "role", "") != "adapter_gain"]
    reader = getattr(after[0], "role", "") if after else ""
    if reader in ("activation", "gated_activation"):
        return 0.0, 0.0
    forward, backward = _GAIN["compiled"]
    is_normed = reader == "residual" and len(after) > 1 and isinstance(after[1], Norm)
    return (0.0 if is_normed else forward), backward


def is_made_again(op: Op, ops: Sequence[Op]) -> bool:
    """Return whether the kernels of backward in a compiled block make the product with DoRA's factors as they read it:
    then what it multiplies is kept in its place.
    """
    return isinstance(op, Elementwise) and op.role == "adapter_gain" and gain_passes(op, ops)[0] == 0


def lone_sums(ops: Sequence[Op], partition: Partition) -> Floats:
    """Return the elements of adapters' sums that attention reads as they are: all before it but what Rope turns."""
    end = next((i for i, op in enumerate(ops) if isinstance(op, CoreAttention)), 0)
    sums = sum(op.writes_per_token for op in ops[:end] if isinstance(op, Elementwise) and op.role == "adapter_sum")
    turned = sum(op.num_heads * op.head_dim for op in ops[:end] if isinstance(op, Rope))
    return np.asarray(max(sums - turned, 0) * partition.tokens / partition.tp)


def _times(passes: tuple[float, float], elements: Floats) -> Passes:
    return passes[0] * elements, passes[1] * elements
