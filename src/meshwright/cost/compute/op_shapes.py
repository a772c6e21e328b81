"""What a traced matmul or attention multiplies, read off its tensors; moved_bytes: what an operator really moves.

Ignored: how strides lie in memory. A grouped matmul's rows are taken to be spread evenly over its groups, since how
many each has is data.

moved_bytes: what an operator really moves through memory, where it is not all that it is given and returns:

    filling a new tensor like another    what is written
    gathering a few rows of a table      twice the rows
    writing over a tensor                what is written, and what it is made from
    writing rows over a few of a table   twice the rows
    FSDP's copy into its buffer          this rank's shard, twice, however large the buffer of all ranks is
    adding to a few elements             these, read and written, and what is added
    the gradient of a picked logit       what is written: its inputs only say how large that is
    optimizers and lists in place        what is read, and all but the gradients written again

Everything else reads its inputs and writes its outputs once. Source: the operators' own definitions. Ignored: what the
caches still hold, and broadcast inputs, which count as large as they are treated.
"""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.cost.attention_rates import AttentionKernel
from meshwright.errors import UnsupportedError
from meshwright.spec.trace.trace import Signature

_FIRST_FACTOR = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Where among the inputs the two factors begin."""
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
_LOOP, _LOOP_GRADIENT = "grouped_matmul_by_loop", "grouped_matmul_by_loop_weight_gradient"
_DTYPES = {"float8_e4m3fn": "float8", "float8_e5m2": "float8", "float4_e2m1fn_x2": "float4"}
"""Formats by what devices call them, where torch has another name."""
TF32 = "tf32"
_BY_ROWS = ("attention_by_rows", "attention_by_rows_backward")
"""Attention without a kernel: parallelism/context/blockwise_attention.py."""
ATTENTION_BACKWARD_FLOPS = 5 / 2
"""Over those of the forward pass: five products for two, one of them recomputed."""
NARROW_HEAD = 96
"""Width from which on heads reach the full rate: narrow_head of constants.toml."""
_ATTENTION: dict[str, AttentionKernel] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": "published",
    "aten._scaled_dot_product_fused_attention_overrideable": "published",
    "aten._scaled_dot_product_flash_attention": "flash",
    "aten._scaled_dot_product_cudnn_attention": "cudnn",
    "aten._scaled_dot_product_efficient_attention": "efficient",
    "meshwright.flex_attention": "flex",
    "meshwright.varlen_attention": "varlen",
}
"""The kernel by how an operator begins; the last two are of tracer/record/sparse_attention.py."""


@dataclass(frozen=True)
class MatmulShape:
    """`groups` products of (m, k) and (k, n)."""

    m: float
    n: float
    k: float
    groups: float
    num_kernels: float
    dtype: str
    """Of the factors, as devices call it."""
    precision: str
    """float8-rowwise or mxfp8 where scales are finer than one a tensor, else empty."""
    is_grouped: bool
    is_routed: bool = False
    """Whether m is the mean of groups that differ."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention of all heads of all sequences at once."""

    flops: float
    """Of the forward pass, without what a causal mask leaves out."""
    context: float
    """Keys that a query attends to in the mean."""
    head_width: float
    dtype: str
    is_backward: bool
    kernel: AttentionKernel = "published"
    by_rows: tuple[int, int, int, int, int] | None = None
    """Where no kernel hides the scores: sequences, queries and keys of each, heads of both."""


def op_flops(signature: Signature) -> float:
    """Return the FLOPs of an operator, without what a causal mask leaves out; 0 of what is no matmul, no attention."""
    name = base_name(signature)
    if (matmul := matmul_shape(signature, name)) is not None:
        return 2.0 * matmul.m * matmul.n * matmul.k * matmul.groups
    attention = attention_shape(signature, name)
    if attention is None:
        return 0.0
    return attention.flops * (ATTENTION_BACKWARD_FLOPS if attention.is_backward else 1.0)


def matmul_shape(signature: Signature, name: str) -> MatmulShape | None:
    """Return the factors of operator `name` (without namespace and overload); None if it is no matmul."""
    dims = [shape.dims for shape in signature.inputs]
    dtype = _matmul_dtype(signature) if dims else ""
    if name in _FIRST_FACTOR:
        first = _FIRST_FACTOR[name]
        (*batch, m, k), (*_, n) = dims[first], dims[first + 1]
        groups = float(batch[0] if batch else 1)
        return MatmulShape(m, n, k, groups, 1, dtype, _precision(signature), is_grouped=False)
    if name in _GROUPED or name in (_LOOP, _LOOP_GRADIENT):
        return _grouped_shape(signature, name, dtype)
    return None


def _matmul_dtype(signature: Signature) -> str:
    dtype = signature.inputs[0].dtype
    return TF32 if signature.is_tf32 and dtype == "float32" else _DTYPES.get(dtype, dtype)


def _grouped_shape(signature: Signature, name: str, dtype: str) -> MatmulShape:
    first, second, result = signature.inputs[0].dims, signature.inputs[1].dims, signature.outputs[0].dims
    groups = float(max(second[0] if len(second) == 3 else 1, result[0] if len(result) == 3 else 1))
    if len(result) == 3:  # One product for each group: rows are what is summed over.
        rows = first[0] if name == _LOOP_GRADIENT else first[-1]
        m, n, k = float(result[1]), float(result[2]), rows / groups
    else:
        m, n, k = first[0] / groups, float(result[-1]), float(first[-1])
    num_kernels = 1.0 if name in _GROUPED else groups
    precision, is_routed = _precision(signature), len(result) < 3
    return MatmulShape(m, n, k, groups, num_kernels, dtype, precision, is_grouped=True, is_routed=is_routed)


def _precision(signature: Signature) -> str:
    scales = [shape for shape in signature.inputs[2:] if shape.dtype.startswith(("float8_e8m0", "float32"))]
    if "scaled" not in signature.op or not scales:
        return ""
    if scales[0].dtype.startswith("float8_e8m0"):
        return "mxfp8"
    return "float8-rowwise" if any(size > 1 for size in scales[0].dims) else ""


def attention_shape(signature: Signature, name: str) -> AttentionShape | None:
    """Return what operator `name` attends to; None if it is no attention, UnsupportedError if it is one unknown."""
    if "attention" not in name:
        return None
    if name in _BY_ROWS:
        return _shape_by_rows(signature, name)
    kernel = next((kernel for begin, kernel in _ATTENTION.items() if signature.op.startswith(begin)), None)
    if kernel is None:
        raise UnsupportedError(
            f"{signature.op} is attention with a kernel that no cost is known of: "
            "call torch.nn.functional.scaled_dot_product_attention, which is traced as flash or efficient attention"
        )
    is_backward = "backward" in name
    # Backward has the gradient of the result first.
    query, key, value = (shape.dims for shape in signature.inputs[is_backward : 3 + is_backward])
    batch, heads, queries, width = query
    head_width = (width + value[-1]) / 2
    if kernel in ("flex", "varlen"):
        context = _counted_context(signature, 4.0 * batch * heads * queries * head_width)
    else:
        context = key[-2] / 2 if signature.is_causal else float(key[-2])
    flops = 4.0 * batch * heads * queries * head_width * context
    dtype = signature.inputs[is_backward].dtype
    is_wide = dtype not in ("bfloat16", "float16")
    # What torch has in 32 bits is one kernel, whatever its operator is called.
    kernel = "published" if is_wide and kernel != "flex" else kernel
    return AttentionShape(flops, context, head_width, dtype, is_backward, kernel)


def _counted_context(signature: Signature, flops_per_key: float) -> float:
    """Return the keys that a query attends to in the mean, by the FLOPs that the tracer counted for a sparse mask."""
    return signature.flops / flops_per_key / (ATTENTION_BACKWARD_FLOPS if "backward" in signature.op else 1.0)


def _shape_by_rows(signature: Signature, name: str) -> AttentionShape:
    """Return what attention by rows multiplies: positions stand before heads, and no score is left out."""
    (batch, queries, heads, width), key, value = (shape.dims for shape in signature.inputs[:3])
    head_width = (width + value[-1]) / 2
    return AttentionShape(
        flops=4.0 * batch * heads * queries * key[1] * head_width,
        context=float(key[1]),
        head_width=head_width,
        dtype=signature.outputs[0].dtype,
        is_backward=name == _BY_ROWS[1],
        by_rows=(batch, queries, key[1], heads, key[2]),
    )


_FREE = (
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_unsafe_view"),
    *("resize_", "set_", "detach_", "lift_fresh", "_local_scalar_dense", "record_stream", "_reshape_alias"),
)
"""Operators that only allocate, or return a view."""
_GATHERS = ("embedding", "index", "index_select", "gather", "nll_loss_forward", "take_along_dim")
_OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "uniform_", "normal_", "masked_fill_")
_FILLS = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
"""Operators that are given a tensor for its format alone."""

_COMMUNICATION = ("c10d.", "_c10d_functional.", "_c10d_functional_autograd.")


def is_communication(signature: Signature) -> bool:
    """Return whether it is a collective or a message."""
    return signature.op.startswith(_COMMUNICATION)


def base_name(signature: Signature) -> str:
    """Return the operator's name without namespace and overload."""
    return signature.op.split(".", 1)[1].rsplit(".", 1)[0] if signature.op.count(".") > 1 else signature.op


def is_free(signature: Signature) -> bool:
    """Return whether no kernel runs: memory is only allocated, or looked at otherwise."""
    return base_name(signature) in _FREE


def moved_bytes(signature: Signature) -> float:
    """Return the bytes that a kernel reads and writes."""
    name = base_name(signature)
    if is_free(signature):
        return 0.0
    if name in _FILLS:
        return float(signature.written_bytes)
    if name in _GATHERS:
        return 2.0 * signature.written_bytes
    if name in _OVERWRITES or signature.op.endswith(".out"):
        # What is written over is among what the signature calls read.
        return float(max(signature.read_bytes, signature.written_bytes))
    special = _SPECIAL.get(name)
    if special is not None:
        return special(signature)
    if name.startswith("_foreach_") and name.endswith("_"):
        return 2.0 * signature.read_bytes
    return float(signature.read_bytes + signature.written_bytes)


def _shard_twice(signature: Signature) -> float:
    return 2.0 * signature.written_bytes * _share_of_first(signature)


def _share_of_first(signature: Signature) -> float:
    """Return the part of its outputs' elements that the first one has."""
    sizes = [_num_elements(output.dims) for output in signature.outputs]
    return sizes[0] / max(sum(sizes), 1)


def _num_elements(dims: tuple[int, ...]) -> int:
    count = 1
    for size in dims:
        count *= size
    return count


def _times_rows(times: float) -> Callable[[Signature], float]:
    """Return a function of an operator that moves so many times the bytes of its last input, as its output has them."""

    def moved(signature: Signature) -> float:
        rows, table = signature.inputs[-1], signature.outputs[0]
        return signature.written_bytes * times * _num_elements(rows.dims) / max(_num_elements(table.dims), 1)

    return moved


def _adam(signature: Signature) -> float:
    # Of parameter, gradient and both moments, all but the gradient are written again.
    return (4 + 3) / 4 * signature.read_bytes


_SPECIAL: dict[str, Callable[[Signature], float]] = {
    "all_gather_copy_in": _shard_twice,
    "index_copy_": _times_rows(2.0),
    "scatter_add_": _times_rows(3.0),
    "nll_loss_backward": lambda signature: float(signature.written_bytes),
    "_fused_adamw_": _adam,
    "_fused_adam_": _adam,
}
