"""What backward needs of one block: the tensors that its ops keep, as bytes of one token by how ranks divide them.

Read off the op list of a block, op by op (what each kind keeps is what torch's own kernels keep):

    norm          its input, and one number for each vector (float32), two with a mean; what it makes, where a matmul
                  reads that; eager RMSNorm on a processor its input and that divided by its root mean square, both in
                  float32: torch has no kernel there that does it at once
    matmul        its input, once for all that read the same: counted with what makes it
    attention     queries, keys, values, output and a sum for each query (float32); unfused: the probabilities instead
    elementwise   its inputs where it is a product (Elementwise.keeps_inputs); its output where a matmul reads that
    frozen        a matmul with frozen weights keeps no input; A of its adapter does, or with dropout what that makes of
                  it and a mask of a byte for each element, and B the output of A
    router        a float32 copy of its input in eager code; the scores
    rope, sums    nothing

By recompute policy: all of these (none); the block's input (full); that and the outputs of attention and of matmuls, of
row-parallel ones once they are reduced (selective, "matmul-outputs"), of every second matmul only
("half-of-matmul-outputs"), or all but the probabilities of attention ("core-attention"). A compiled dense block does
not keep the output of its last matmul, which no backward op reads; torch's eager checkpoints do.

Ignored: what Ulysses repeats where there are fewer key heads than cp ranks, token ids, rotary angles, routing indices,
masks of dropout between blocks, scales of low-precision formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from meshwright.cost.compute.own_elements import is_made_again
from meshwright.spec.layout.layout import ActivationCheckpoint
from meshwright.spec.model.op import CoreAttention, Elementwise, GroupedMatmul, Head, Matmul, Norm, Op
from meshwright.spec.step.stack import Stack
from meshwright.spec.step.workload import Workload

Split = Literal["stream", "gathered", "latent", "heads", "product", "rows", "other_keys", "mask"]
"""How ranks divide a tensor.

stream: between matmuls, shared with sequence parallelism; gathered: the whole sequence, where a stack does not gather
it again in backward; latent: what each tp rank computes for the whole sequence, unless it computes with shards; heads:
shared by tp; product: the same, of what the last matmul of a dense network reads; rows: of routed tokens, whole if
experts are split over tp. What keys and values all-gather brings from the other cp ranks, and the mask it needs, are
there only if it is the method of cp. A compiled block recomputes its gathered tensors and products where tp ranks
gather again, or join the product of one sequence with a reduce-scatter (async tp).
"""

_FLOAT32_BYTES = 4.0
_MASK_BYTES = 1.0
_PROBABILITY_BYTES = 5.0
"""Of unfused attention for each pair of tokens: softmax output and what dropout makes of it (2 + 2), and its mask (1).

Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1.
"""


class Formats(NamedTuple):
    """What changes the bytes that ops keep, besides the ops."""

    kernels: str
    """Stack.kernels."""
    routes_in_float32: bool
    """Whether a router keeps its input in float32, also where the block is compiled."""
    attention: str
    """Stack.attention."""
    selective: str
    """Stack.selective."""
    element_bytes: float
    """Between matmuls."""
    matmul_bytes: float
    """Of a matmul's input as it is kept."""
    seq_len: int
    drops_attention: bool
    """Whether selective recomputation runs attention again (recompute.py)."""
    repeats_keys: bool
    """Whether keys and values get as many heads as queries have, as causal_attention.py does in 32 bits."""
    low_bytes: float
    """Of a matmul's input as the matmul reads it."""
    divides_in_float32: bool = False
    """Whether an RMSNorm keeps float32 copies of its input and of that before it is scaled."""
    casts_again: bool = False
    """Whether backward makes inputs of matmuls again, as Inductor does where it casts them to float8."""

    @classmethod
    def of(
        cls,
        workload: Workload,
        stack: Stack,
        kernels: str,
        *,
        drops_attention: bool = False,
        repeats_keys: bool = False,
    ) -> Formats:
        """Return those of `stack` with the `kernels` that a layout makes of its own."""
        wide = float(workload.activation_element_bytes)
        # Only kernels written for it keep the low-precision copy instead of what it was made from.
        low = {"float8": 1.0, "float4": 0.5}.get(workload.matmul_dtype, wide)
        return cls(
            kernels,
            stack.eager_mixtures or kernels == "eager",
            stack.attention,
            stack.selective,
            wide,
            low if kernels == "fused" else wide,
            workload.seq_len,
            drops_attention,
            repeats_keys,
            low,
        )


Bytes = Mapping[Split, float]
"""Bytes of one token by how they are divided."""


@lru_cache(maxsize=1024)
def kept_bytes(ops: tuple[Op, ...], formats: Formats, policy: ActivationCheckpoint) -> Bytes:
    """Return what one block of `ops` keeps for backward under `policy`."""
    return _summed(_POLICIES[policy](ops, formats))


@lru_cache(maxsize=1024)
def transient_bytes(ops: tuple[Op, ...], formats: Formats) -> Bytes:
    """Return the largest set of gradients that the backward of one op reads and writes next to what is kept."""
    stream: tuple[Split, float] = ("stream", 2 * _width(ops) * formats.element_bytes)
    return max((_summed([stream, *_gradients(op, formats)]) for op in ops), key=lambda parts: sum(parts.values()))


@lru_cache(maxsize=1024)
def pending_bytes(ops: tuple[Op, ...], formats: Formats) -> Bytes:
    """Return the gradients that one block of `ops` holds from its backward to the inputs until that to the weights.

    In eager code those of the outputs of all ops with weights; of a compiled block that of its output alone.
    """
    if formats.kernels != "eager":
        return _summed([("stream", _width(ops) * formats.element_bytes)])
    return _summed(_gradients_of_outputs(ops, formats))


_Parts = Iterator[tuple[Split, float]]


def _summed(parts: _Parts | Sequence[tuple[Split, float]]) -> Bytes:
    total: dict[Split, float] = {}
    for split, size in parts:
        total[split] = total.get(split, 0.0) + size
    return total


def _width(ops: Sequence[Op]) -> int:
    """Return the elements of one token between blocks: what the first norm reads."""
    return next(op.width for op in ops if isinstance(op, Norm))


def _input_only(ops: tuple[Op, ...], formats: Formats) -> _Parts:
    yield "stream", _width(ops) * formats.element_bytes


def _everything(ops: tuple[Op, ...], formats: Formats) -> _Parts:
    for op, after in zip(ops, (*ops[1:], None), strict=True):
        if isinstance(op, Norm):
            yield from _kept_by_norm(op, _is_read_by_matmul(op, ops, formats), formats)
        elif isinstance(op, CoreAttention):
            yield from _kept_by_attention(op, ops, formats)
            yield from _other_keys(op, formats)
            yield "mask", formats.seq_len / 2 * formats.element_bytes
            is_kept = after is None or _keeps_input(after)
            if is_kept and (formats.matmul_bytes < formats.element_bytes or formats.casts_again):
                # Attention needs its output as it was, the next matmul in its own format.
                yield "heads", op.num_heads * op.value_head_dim * formats.low_bytes
        elif isinstance(op, Elementwise):
            if not (formats.kernels == "compiled" and is_made_again(op, ops)):
                yield from _kept_by_elementwise(op, after, formats)
        elif isinstance(op, Matmul) and op.part == "router":
            yield "rows", op.out_features * _FLOAT32_BYTES
            if formats.routes_in_float32:
                yield "rows", op.in_features * _FLOAT32_BYTES
        elif isinstance(op, Matmul) and op.adapter_matrix == "A":
            yield from _kept_by_adapter(op, formats)


def _kept_by_adapter(op: Matmul, formats: Formats) -> _Parts:
    """Yield what A keeps of its own input, where dropout has made it, and B of A's output."""
    yield "latent", op.out_features * formats.element_bytes
    if op.drops_input:
        yield "heads" if op.tensor_split == "rows" else "latent", op.in_features * (formats.element_bytes + _MASK_BYTES)


def _is_read_by_matmul(op: Norm, ops: Sequence[Op], formats: Formats) -> bool:
    """Return whether a matmul keeps what `op` makes: a router in float32 keeps a copy instead."""
    after = ops[ops.index(op) + 1 :]
    readers = [part for part in after[: _next_norm(after)] if isinstance(part, Matmul | Head)]
    return any(_keeps_input(part) and not (part.part == "router" and formats.routes_in_float32) for part in readers)


def _keeps_input(op: Op) -> bool:
    """Return whether backward needs the input of a matmul as it was read, for the gradient of its weight."""
    has_own_input = isinstance(op, Matmul) and (op.adapter_matrix == "B" or op.drops_input)
    return not op.is_frozen and not has_own_input


def _next_norm(ops: Sequence[Op]) -> int:
    return next((index for index, op in enumerate(ops) if isinstance(op, Norm)), len(ops))


def _kept_by_norm(op: Norm, is_read: bool, formats: Formats) -> _Parts:
    size = op.width * op.vectors_per_token
    statistics = op.vectors_per_token * _FLOAT32_BYTES * (1 + op.has_bias)
    if op.input == "heads":
        # RoPE then makes new tensors of them.
        yield "heads", size * formats.element_bytes + statistics
        return
    in_parts = formats.divides_in_float32 and not op.has_bias
    yield op.input, size * (2 * _FLOAT32_BYTES if in_parts else formats.element_bytes) + statistics
    if is_read and not formats.casts_again:
        yield "latent" if op.input == "latent" else "gathered", size * formats.matmul_bytes


def _kept_by_attention(op: CoreAttention, ops: Sequence[Op], formats: Formats) -> _Parts:
    queries, outputs = op.num_heads * op.head_dim, op.num_heads * op.value_head_dim
    keys = _num_key_heads(op, formats) * op.head_dim
    values = op.num_heads * op.value_head_dim if formats.repeats_keys else _value_elements(op, ops, formats)
    yield "heads", (queries + keys + values + outputs) * formats.element_bytes
    if formats.attention == "flash":
        yield "heads", op.num_heads * _FLOAT32_BYTES
    else:
        yield from _probabilities(op, formats)


def _num_key_heads(op: CoreAttention, formats: Formats) -> int:
    """Return the heads that attention's kernel gets of keys and values."""
    return op.num_heads if formats.repeats_keys else op.num_kv_heads


def _probabilities(op: CoreAttention, formats: Formats) -> _Parts:
    yield "heads", op.num_heads * formats.seq_len * _PROBABILITY_BYTES


def _other_keys(op: CoreAttention, formats: Formats) -> _Parts:
    yield "other_keys", op.num_kv_heads * (op.head_dim + op.value_head_dim) * formats.element_bytes


def _value_elements(op: CoreAttention, ops: Sequence[Op], formats: Formats) -> int:
    """Return the elements that stay for the values: of the whole matmul output that they are a view of."""
    if formats.kernels == "fused":
        return op.num_kv_heads * op.value_head_dim
    before = ops[: ops.index(op)]
    return next(
        (part.out_features for part in reversed(before) if isinstance(part, Matmul)),
        op.num_kv_heads * op.value_head_dim,
    )


def _kept_by_elementwise(op: Elementwise, after: Op | None, formats: Formats) -> _Parts:
    is_read = isinstance(after, GroupedMatmul) or (isinstance(after, Matmul) and after.tensor_split == "rows")
    # Between the matmuls of a network its width is shared; before and after them are rows of the stream's width.
    split: Split = "heads" if op.role in ("activation", "gated_activation") else "rows"
    # Fused kernels weigh routed rows inside the network, where they are narrower.
    if op.role == "adapter_gain":
        yield "heads", op.reads_per_token * formats.element_bytes
        return
    is_needed = is_read and after is not None and _keeps_input(after)
    if op.keeps_inputs and (is_read or formats.kernels != "fused"):
        yield split, op.reads_per_token * formats.element_bytes
        has_factors = op.role == "gated_activation" and op.part != "experts"
        if is_read and formats.kernels == "eager" and has_factors:
            # activation(gate), which the product with the other half needs; our experts recompute it.
            yield split, op.writes_per_token * formats.element_bytes
    if is_needed:
        is_dense = split == "heads" and isinstance(after, Matmul)
        if is_dense and formats.casts_again:
            return
        yield "product" if is_dense else split, op.writes_per_token * formats.matmul_bytes


def _selected(ops: tuple[Op, ...], formats: Formats) -> _Parts:
    if formats.selective == "core-attention":
        yield from _everything(ops, formats)
        for op in ops:
            if isinstance(op, CoreAttention) and formats.attention == "unfused":
                yield from ((split, -size) for split, size in _probabilities(op, formats))
        return
    yield from _input_only(ops, formats)
    keeps_all, num_matmuls = formats.selective == "matmul-outputs", 0
    unread = _unread_matmul(ops, formats)
    for op in ops:
        if isinstance(op, CoreAttention):
            if not formats.drops_attention:
                yield "heads", op.num_heads * (op.value_head_dim * formats.element_bytes + _FLOAT32_BYTES)
            yield from _other_keys(op, formats)
        if isinstance(op, Matmul | GroupedMatmul):
            num_matmuls += 1
            if (keeps_all or num_matmuls % 2) and op is not unread:
                yield from _matmul_output(op, ops, formats)


def _unread_matmul(ops: Sequence[Op], formats: Formats) -> Op | None:
    """Return the matmul of a compiled block whose output no backward op reads: the last one."""
    # Mixtures are compiled in parts, around what the compiler cannot take.
    if formats.kernels != "compiled" or any(isinstance(op, GroupedMatmul) for op in ops):
        return None
    return next(op for op in reversed(ops) if isinstance(op, Matmul))


def _matmul_output(op: Matmul | GroupedMatmul, ops: Sequence[Op], formats: Formats) -> _Parts:
    if isinstance(op, GroupedMatmul):
        is_wide = op.out_features == _width(ops)
        yield "rows" if is_wide else "heads", op.experts_per_token * op.out_features * formats.element_bytes
    elif op.part == "router":
        yield "rows", op.out_features * _FLOAT32_BYTES
    elif op.tensor_split == "columns":
        yield "heads", op.out_features * formats.element_bytes
    else:
        # Of a sum over ranks not the terms are kept, but their reduce-scattered sum.
        yield "stream" if op.tensor_split == "rows" else "latent", op.out_features * formats.element_bytes


_POLICIES = {"none": _everything, "selective": _selected, "full": _input_only}


def _gradients_of_outputs(ops: Sequence[Op], formats: Formats) -> _Parts:
    for op in ops:
        if isinstance(op, Matmul) and op.tensor_split == "rows" and not op.is_frozen:
            # Gathered where the sum was shared out.
            yield "latent", op.out_features * formats.element_bytes
        elif isinstance(op, Matmul | GroupedMatmul) and not op.is_frozen:
            yield from _matmul_output(op, ops, formats)
        elif isinstance(op, Norm) and not op.is_frozen:
            yield "heads" if op.input == "heads" else "stream", op.width * op.vectors_per_token * formats.element_bytes


def _gradients(op: Op, formats: Formats) -> _Parts:
    """Yield the gradients that the backward of `op` reads and writes."""
    if isinstance(op, CoreAttention):
        width = (2 * op.num_heads + _num_key_heads(op, formats)) * (op.head_dim + op.value_head_dim)
        yield "heads", width * formats.element_bytes
        if formats.attention == "unfused":
            yield "heads", 2 * op.num_heads * formats.seq_len * formats.element_bytes
    elif isinstance(op, Elementwise) and op.keeps_inputs:
        split: Split = "heads" if op.writes_per_token * 2 >= op.reads_per_token else "rows"
        yield split, (op.reads_per_token + op.writes_per_token) * formats.element_bytes
