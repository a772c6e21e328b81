"""What a traced matmul or attention multiplies, read off its tensors.

Ignored: how strides lie in memory. A grouped matmul's rows are taken to be spread evenly over its groups, since how
many each has is data.
"""

from dataclasses import dataclass

from meshwright.cost.attention_rates import AttentionKernel
from meshwright.cost.compute.op_table import AttentionOp, MatmulOp, op_name, torch_op
from meshwright.errors import UnsupportedError
from meshwright.spec.trace.trace import Signature

_DTYPES = {"float8_e4m3fn": "float8", "float8_e5m2": "float8", "float4_e2m1fn_x2": "float4"}
"""Formats by what devices call them, where torch has another name."""
TF32 = "tf32"
ATTENTION_BACKWARD_FLOPS = 5 / 2
"""Over those of the forward pass: five products for two, one of them recomputed."""
NARROW_HEAD = 96
"""Width from which on heads reach the full rate: narrow_head of constants.toml."""


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
    if (matmul := matmul_shape(signature)) is not None:
        return 2.0 * matmul.m * matmul.n * matmul.k * matmul.groups
    attention = attention_shape(signature)
    if attention is None:
        return 0.0
    return attention.flops * (ATTENTION_BACKWARD_FLOPS if attention.is_backward else 1.0)


def matmul_shape(signature: Signature) -> MatmulShape | None:
    """Return the factors of an operator; None if it is no matmul."""
    op = torch_op(signature.op)
    if not isinstance(op, MatmulOp):
        return None
    dtype, precision = _matmul_dtype(signature), _precision(signature) if op.is_scaled else ""
    if op.groups:
        return _grouped_shape(signature, op, dtype, precision)
    first, second = (shape.dims for shape in signature.inputs[op.first_factor : op.first_factor + 2])
    (*batch, m, k), (*_, n) = first, second
    return MatmulShape(m, n, k, float(batch[0] if batch else 1), 1, dtype, precision, is_grouped=False)


def _matmul_dtype(signature: Signature) -> str:
    dtype = signature.inputs[0].dtype
    return TF32 if signature.is_tf32 and dtype == "float32" else _DTYPES.get(dtype, dtype)


def _grouped_shape(signature: Signature, op: MatmulOp, dtype: str, precision: str) -> MatmulShape:
    first, second, result = signature.inputs[0].dims, signature.inputs[1].dims, signature.outputs[0].dims
    groups = float(max(second[0] if len(second) == 3 else 1, result[0] if len(result) == 3 else 1))
    if len(result) == 3:  # One product for each group: rows are what is summed over.
        rows = first[0] if op.groups == "loop over gradients" else first[-1]
        m, n, k = float(result[1]), float(result[2]), rows / groups
    else:
        m, n, k = first[0] / groups, float(result[-1]), float(first[-1])
    num_kernels, is_routed = 1.0 if op.groups == "kernel" else groups, len(result) < 3
    return MatmulShape(m, n, k, groups, num_kernels, dtype, precision, is_grouped=True, is_routed=is_routed)


def _precision(signature: Signature) -> str:
    scales = [shape for shape in signature.inputs[2:] if shape.dtype.startswith(("float8_e8m0", "float32"))]
    if not scales:
        return ""
    if scales[0].dtype.startswith("float8_e8m0"):
        return "mxfp8"
    return "float8-rowwise" if any(size > 1 for size in scales[0].dims) else ""


def attention_shape(signature: Signature) -> AttentionShape | None:
    """Return what an operator attends to; None if it is no attention, UnsupportedError if it is one unknown."""
    op = torch_op(signature.op)
    if not isinstance(op, AttentionOp):
        _refuse_unknown_attention(signature)
        return None
    if op.kernel is None:
        return _shape_by_rows(signature, is_backward=op.is_backward)
    kernel, is_backward = op.kernel, op.is_backward
    # Backward has the gradient of the result first.
    query, key, value = (shape.dims for shape in signature.inputs[is_backward : 3 + is_backward])
    batch, heads, queries, width = query
    head_width = (width + value[-1]) / 2
    if kernel in ("flex", "varlen"):
        context = signature.flops / (4.0 * batch * heads * queries * head_width)
        context /= ATTENTION_BACKWARD_FLOPS if is_backward else 1.0
    else:
        context = key[-2] / 2 if signature.is_causal else float(key[-2])
    flops = 4.0 * batch * heads * queries * head_width * context
    dtype = signature.inputs[is_backward].dtype
    is_wide = dtype not in ("bfloat16", "float16")
    # What torch has in 32 bits is one kernel, whatever its operator is called.
    kernel = "published" if is_wide and kernel != "flex" else kernel
    return AttentionShape(flops, context, head_width, dtype, is_backward, kernel)


def _refuse_unknown_attention(signature: Signature) -> None:
    if "attention" in op_name(signature.op).name:
        raise UnsupportedError(
            f"{signature.op} is attention with a kernel that no cost is known of: "
            "call torch.nn.functional.scaled_dot_product_attention, which is traced as flash or efficient attention"
        )


def _shape_by_rows(signature: Signature, *, is_backward: bool) -> AttentionShape:
    """Return what attention by rows multiplies: positions stand before heads, and no score is left out."""
    (batch, queries, heads, width), key, value = (shape.dims for shape in signature.inputs[:3])
    head_width = (width + value[-1]) / 2
    return AttentionShape(
        flops=4.0 * batch * heads * queries * key[1] * head_width,
        context=float(key[1]),
        head_width=head_width,
        dtype=signature.outputs[0].dtype,
        is_backward=is_backward,
        by_rows=(batch, queries, key[1], heads, key[2]),
    )
