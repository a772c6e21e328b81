"""matmul_lines: the matmuls of one block on one rank, with their shapes and what of them is cast to low precision.

    columns     (tokens, out / tp, in)    rows   (tokens, out, in / tp)    none   (tokens between matmuls, out, in)
    head        (tokens, vocabulary / tp, width); with loss_chunks as many of a share of the tokens, one after the
                other, of pairs of answers again in backward
    adapters    those of any linear layer, in 16 bits; what is frozen has no product for its weight's gradient
    experts     (tokens / tp x etp x chosen, spread evenly over num_experts / ep of them x ep senders, out, in)
    casts       inputs once for all matmuls that read them, outputs' gradients, weights twice; what is gathered in low
                precision is cast on its shard, weights so thinly that it is nothing

Matmuls that read the same tensor (query, key and value; gate and up) are one where the stack fuses them. Source of the
casts: torchao 0.9's float8 tensor parallelism, read 2026-11-21. Ignored: the weights' shards.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compute.float8_matmuls import takes_low_precision
from meshwright.cost.layout_table import Bools, Floats, Ints
from meshwright.cost.training_setup import Partition
from meshwright.spec.model.model_spec import BlockGroup
from meshwright.spec.model.op import NARROW_WEIGHT_BYTES, GroupedMatmul, Head, Matmul, Op
from meshwright.spec.step.adapter import LORA_A

_WIDE_BYTES = 2.0
_WIDENED = 1.0
"""Times 16 bits that are written of a weight that had fewer, before its matmul reads them."""
_UNFUSED = {"nf4": 4.0}
"""The same besides, where no compiler fuses the kernels that make it wide: indexes, numbers of the table, and times the
scale (models/packed_weight.py); for int8 that is one kernel.
"""
_ROW_NORM_PASSES = 2.0
"""Of a weight whose rows have norms that are trained: W is read for them and multiplied with A, whose product is as
narrow as the rank (models/adapted_linear.py). Their gradient passes through none of it (DoRA, section 4.3). Other
software makes B A whole, for three passes more. Products of ours are lines of their own, and leave one pass; none where
a compiler adds up squares as it makes a packed weight wide.
"""


@dataclass(frozen=True)
class Matmuls:
    """One line for each matmul (or group of equal ones) of each block group."""

    block: Ints
    """Row of the BlockTable."""
    m: Floats
    n: Floats
    k: Floats
    groups: Floats
    """Equal matmuls in one kernel, or one after the other."""
    is_expert: Bools
    is_attention: Bools
    """Whether it is next to attention, in its module."""
    is_float32: Bools
    """Whether it is computed in float32, as our routers are."""
    is_low: Bools
    """Whether it is computed in the workload's precision; the head stays in 16 bits."""
    has_input_gradient: Bools
    """Whether backward has the gradient of its input."""
    has_weight_gradient: Bools
    is_early: Bools
    """Whether forward computes its gradients too, as a loss in chunks does those of the head."""
    runs_again: Bools
    """Whether backward computes it again, as a loss in chunks of pairs of answers does the head."""
    cast_inputs: Floats
    """Elements of its input that are cast to that precision."""
    cast_weights: Floats
    cast_outputs: Floats
    """Elements of its output's gradient that are cast."""
    weight_moves: Floats
    """Times 16 bits that forward moves for a weight besides: to make one of 8 or 4 bits wide, for norms of rows."""
    weight_moves_again: Floats
    """The same of backward."""


def matmul_lines(group: BlockGroup, partition: Partition) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the columns of Matmuls but `block` for each matmul of a block, one element a key."""
    one = np.ones_like(partition.tokens)
    before: Op | None = None
    for op, num_fused in _fused(group.ops) if partition.fuses else [(op, 1.0) for op in group.ops]:
        if isinstance(op, Matmul):
            columns = partition.tp if op.tensor_split == "columns" else one
            rows = partition.tp if op.tensor_split == "rows" else one
            tokens = partition.tokens_between if op.tensor_split == "none" else partition.tokens
            n, k = num_fused * op.out_features / columns, op.in_features / rows
            line = _line(tokens, n, k, one, op, is_low=takes_low_precision(op, n, k, partition))
            # Eager code makes a packed weight wide for its product, and again for the norms of its rows.
            unpackings = 2.0 if _unpacks_twice(op, partition) else 1.0
            unfused = np.where(partition.compiles_blocks, 0.0, n * k * _UNFUSED.get(op.weights, 0.0))
            line["weight_moves"] = line["weight_moves"] + (unpackings - 1) * (unfused + n * k * _widened(op))
            line["weight_moves"] = line["weight_moves"] + unfused
            line["weight_moves_again"] = line["weight_moves_again"] + unfused * op.has_input_gradient
            if op.trains_row_norms and partition.is_own:
                joins = partition.compiles_blocks and op.weights in NARROW_WEIGHT_BYTES
                line["weight_moves"] = line["weight_moves"] - n * k * (_ROW_NORM_PASSES - (0.0 if joins else 1.0))
                yield from _row_norm_lines(op, group, n, k)
            if partition.routes_in_float32 and op.part == "router":
                yield line | {"is_float32": ~line["is_float32"], "is_low": np.zeros_like(line["is_low"])}
            elif op.part == "attention":
                yield _cast(op, before, partition, line | {"is_attention": ~line["is_attention"]})
            else:
                yield _cast(op, before, partition, line)
        elif isinstance(op, GroupedMatmul):
            num_local = op.num_experts / partition.ep
            rows = partition.tokens / partition.tp * partition.etp * op.experts_per_token / num_local
            n = num_fused * op.out_features / (partition.etp if op.tensor_split == "columns" else one)
            k = op.in_features / (partition.etp if op.tensor_split == "rows" else one)
            is_low = takes_low_precision(op, n, k, partition)
            yield _cast(op, before, partition, _line(rows, n, k, num_local, op, is_low=is_low))
        elif isinstance(op, Head):
            chunks = partition.loss_chunks * one
            line = _line(
                partition.tokens / chunks, op.vocab_size / partition.tp, op.dim * one, chunks, op, is_low=False
            )
            in_backward = partition.pairs_answers & (chunks > 1)
            yield line | {"is_early": (chunks > 1) & ~in_backward, "runs_again": in_backward}
        before = op if isinstance(op, Matmul | GroupedMatmul) else before


def _unpacks_twice(op: Matmul, partition: Partition) -> bool:
    is_packed = op.weights in NARROW_WEIGHT_BYTES
    return partition.is_own and op.trains_row_norms and is_packed and not partition.compiles_blocks


def _widened(op: Op) -> float:
    """Return the times 16 bits that are moved for each element to make a weight of 8 or 4 bits wide; else 0."""
    narrow_bytes = NARROW_WEIGHT_BYTES.get(op.weights)
    return 0.0 if narrow_bytes is None else _WIDENED + narrow_bytes / _WIDE_BYTES


def _row_norm_lines(op: Matmul, group: BlockGroup, n: Floats, k: Floats) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the products of the norms of DoRA's rows, W A^T, A A^T and B (A A^T), the last two in float32."""
    one, first_matrix = np.ones_like(n), f"{op.name}.{LORA_A}"
    rank = one * next(a.out_features for a in group.ops if isinstance(a, Matmul) and a.name == first_matrix)
    plain = op.replace(trains_row_norms=False, weights="frozen", has_input_gradient=False)
    for shape, is_float32 in (((n, rank, k), False), ((rank, rank, k), True), ((n, rank, rank), True)):
        line = _line(*shape, one, plain, is_low=False)
        yield line | {"is_float32": line["is_float32"] | is_float32}


def _cast(op: Matmul | GroupedMatmul, before: Op | None, partition: Partition, line: dict[str, Any]) -> dict[str, Any]:
    """Return `line` with what it casts to low precision: a tensor once for all that read it, and before it is gathered
    where that is gathered in low precision. Kernels that are written for it keep what they have cast (stack.kernels =
    "fused"), of a weight that does not change once and for all. Casts of our own trainer are in float8_matmuls.py.
    """
    if partition.is_own:
        return line
    split = op.tensor_split if isinstance(op, Matmul) and partition.gathers_low else "none"
    is_kept_low = op.is_frozen and partition.fuses
    is_read_before = isinstance(before, Matmul | GroupedMatmul) and _reads_the_same(before, op)
    inputs, outputs = (line["groups"] * line["m"] * line[side] for side in ("k", "n"))
    return line | {
        "cast_inputs": 0 * inputs if is_read_before else inputs / (partition.tp if split == "columns" else 1.0),
        "cast_weights": (0.0 if partition.gathers_low or is_kept_low else 1.0) * line["groups"] * line["n"] * line["k"],
        "cast_outputs": outputs / (partition.tp if split == "rows" else 1.0),
    }


def _fused(ops: tuple[Op, ...]) -> Iterator[tuple[Op, float]]:
    """Yield the ops, neighbours that multiply the same tensor joined: how many times as wide the first one is."""
    matmuls = [op for op in ops if isinstance(op, Matmul | GroupedMatmul)]
    joined = {id(after) for before, after in pairwise(matmuls) if _reads_the_same(before, after)}
    for op in ops:
        if id(op) in joined:
            continue
        width = 1.0
        if isinstance(op, Matmul | GroupedMatmul):
            following = matmuls[next(i for i, other in enumerate(matmuls) if other is op) + 1 :]
            total = float(op.out_features)
            for other in following:
                if id(other) not in joined:
                    break
                total += other.out_features
            width = total / op.out_features
        yield op, width


def _reads_the_same(before: Matmul | GroupedMatmul, after: Matmul | GroupedMatmul) -> bool:
    if (type(before), before.part, before.in_features) != (type(after), after.part, after.in_features):
        return False
    if isinstance(before, GroupedMatmul) or isinstance(after, GroupedMatmul):
        return True
    if before.adapter_matrix != after.adapter_matrix:
        return False
    is_first = after.adapter_matrix == "A" and before.tensor_split == after.tensor_split == "none"
    return is_first or before.tensor_split == after.tensor_split == "columns"


def _line(m: Floats, n: Floats, k: Floats, groups: Floats, op: Op, *, is_low: Bools | bool) -> dict[str, NDArray[Any]]:
    flags = np.zeros(len(groups), np.bool_)
    shape = {
        "m": m,
        "n": n,
        "k": k,
        "groups": groups,
        "is_expert": flags | isinstance(op, GroupedMatmul),
        "is_low": flags | is_low,
    }
    shape |= {"is_attention": flags, "is_float32": flags, "is_early": flags, "runs_again": flags}
    shape |= {"has_input_gradient": flags | op.has_input_gradient, "has_weight_gradient": flags | (not op.is_frozen)}
    weights = groups * n * k
    widened = weights * _widened(op)
    of_norms = weights * (_ROW_NORM_PASSES * (isinstance(op, Matmul) and op.trains_row_norms))
    shape |= {"weight_moves": widened + of_norms, "weight_moves_again": widened * op.has_input_gradient}
    return shape | dict.fromkeys(("cast_inputs", "cast_weights", "cast_outputs"), 0.0 * m)


def last_matmul_share(group: BlockGroup, partition: Partition) -> float:
    """Return the share of a block's matmul FLOPs in its last one, which recomputation leaves out; 0 where that is of
    experts, weighed after, where DoRA's factors have a gradient that is computed from it, or where our eager code
    keeps a packed weight only once it is multiplied.
    """
    matmuls, sizes = _sizes(group)
    last = matmuls[-1] if matmuls else None
    if not isinstance(last, Matmul) or last.trains_row_norms:
        return 0.0
    is_packed = partition.is_own and not partition.compiles_blocks and last.weights in NARROW_WEIGHT_BYTES
    return 0.0 if is_packed else sizes[-1] / sum(sizes)


def second_matmuls_share(group: BlockGroup) -> float:
    """Return the share of every second matmul but the last."""
    _, sizes = _sizes(group)
    return sum(sizes[1:-1:2]) / sum(sizes) if sizes else 0.0


def early_terms_share(group: BlockGroup) -> float:
    """Return the share of row-parallel ones, whose outputs are terms of a sum over tp ranks, but the last."""
    matmuls, sizes = _sizes(group)
    is_term = [isinstance(op, Matmul) and op.tensor_split == "rows" for op in matmuls[:-1]]
    return sum(size for size, term in zip(sizes, is_term, strict=False) if term) / max(1, sum(sizes))


def _sizes(group: BlockGroup) -> tuple[list[Matmul | GroupedMatmul], list[int]]:
    """Return a block's matmuls and what they multiply a token with; experts count as often as it goes to one."""
    matmuls = [op for op in group.ops if isinstance(op, Matmul | GroupedMatmul)]
    often = [op.experts_per_token if isinstance(op, GroupedMatmul) else 1 for op in matmuls]
    return matmuls, [op.in_features * op.out_features * n for op, n in zip(matmuls, often, strict=True)]
