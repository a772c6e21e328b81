"""torch_op: what each of torch's operators does, by its exact name without overload.

TORCH_OPS lists matmuls, attention, collectives, and what moves other bytes than its inputs and outputs once. Names are
those of torch 2.13 (tests/unit/cost/compute/test_op_table.py), of FSDP2, and of our own trainer and tracer.

moved_bytes: what an operator really moves through memory. Source: the operators' own definitions. Ignored: what the
caches still hold, and broadcast inputs, which count as large as they are treated.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from meshwright.cost.attention_rates import AttentionKernel
from meshwright.spec.trace.trace import Signature


@dataclass(frozen=True)
class MatmulOp:
    """A matrix product."""

    first_factor: int = 0
    """Position of the first of both factors among the inputs."""
    is_scaled: bool = False
    """Whether scales of the factors are among the inputs."""
    groups: Literal["", "kernel", "loop", "loop over gradients"] = ""
    """How a grouped product is computed: by one kernel, or by one for each group, which may sum over rows."""


@dataclass(frozen=True)
class AttentionOp:
    """Attention by `kernel`; None for that by rows, which has none (parallelism/context/blockwise_attention.py)."""

    kernel: AttentionKernel | None
    is_backward: bool


@dataclass(frozen=True)
class CollectiveOp:
    """A collective that takes as long as one of these four."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


class Moves(Enum):
    """Which bytes any other operator moves through memory."""

    IN_AND_OUT = "inputs are read and outputs written once"
    NOTHING = "memory is only allocated, or looked at otherwise"
    OUT = "outputs are written; an input only says how large they are"
    TWICE_OUT = "a few rows of a table are read and written"
    OVER = "outputs are written over an input"
    ROWS_OVER = "rows of the last input are read, and written over a few of a table"
    ROWS_ADDED = "rows of the last input are read, and added to a few elements"
    SHARD = "the first output is read and written, however large the others are"
    IN_PLACE = "what is read is written again"
    ADAM = "of parameter, gradient and two moments all but the gradient are written again"


TorchOp = MatmulOp | AttentionOp | CollectiveOp | Moves

_FOREACH = (
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "cos", "cosh", "div",
    "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2", "maximum",
    "minimum", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub",
    "tan", "tanh", "trunc",
)  # fmt: skip
_ATTENTION: dict[str, AttentionKernel | None] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": "published",
    "aten._scaled_dot_product_fused_attention_overrideable": "published",
    "aten._scaled_dot_product_flash_attention": "flash",
    "aten._scaled_dot_product_cudnn_attention": "cudnn",
    "aten._scaled_dot_product_efficient_attention": "efficient",
    "meshwright.flex_attention": "flex",
    "meshwright.varlen_attention": "varlen",
    "meshwright.attention_by_rows": None,
}
_MOVES = {
    Moves.NOTHING: (
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_unsafe_view",
        "resize_", "set_", "detach_", "lift_fresh", "_local_scalar_dense", "record_stream", "_reshape_alias",
    ),
    Moves.OUT: (
        "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "nll_loss_backward",
    ),
    Moves.TWICE_OUT: ("embedding", "index", "index_select", "gather", "nll_loss_forward", "take_along_dim"),
    Moves.OVER: (
        "copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "uniform_", "normal_", "masked_fill_",
    ),
    Moves.ROWS_OVER: ("index_copy_",),
    Moves.ROWS_ADDED: ("scatter_add_",),
    Moves.IN_PLACE: tuple(f"_foreach_{name}_" for name in _FOREACH),
    Moves.ADAM: ("_fused_adamw_", "_fused_adam_"),
}  # fmt: skip
_COLLECTIVES = {
    CollectiveOp("all-gather"): (
        "c10d._allgather_base_", "c10d.allgather_", "c10d.allgather_coalesced_",
        "c10d.allgather_into_tensor_coalesced_", "c10d.broadcast_", "c10d.gather_", "c10d.scatter_",
        "_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_gather_into_tensor_coalesced",
        "_c10d_functional.all_gather_into_tensor_out", "_c10d_functional.broadcast", "_c10d_functional.broadcast_",
        "_c10d_functional_autograd.all_gather_into_tensor",
    ),
    CollectiveOp("reduce-scatter"): (
        "c10d._reduce_scatter_base_", "c10d.reduce_scatter_", "c10d.reduce_scatter_tensor_coalesced_",
        "_c10d_functional.reduce_scatter_tensor", "_c10d_functional.reduce_scatter_tensor_coalesced",
        "_c10d_functional.reduce_scatter_tensor_out", "_c10d_functional_autograd.reduce_scatter_tensor",
    ),
    CollectiveOp("all-reduce"): (
        "c10d.allreduce_", "c10d.allreduce_coalesced_", "c10d.reduce_", "c10d.barrier", "c10d.monitored_barrier_",
        "_c10d_functional.all_reduce", "_c10d_functional.all_reduce_", "_c10d_functional.all_reduce_coalesced",
        "_c10d_functional.all_reduce_coalesced_",
    ),
    CollectiveOp("all-to-all"): (
        "c10d.alltoall_", "c10d.alltoall_base_", "_c10d_functional.all_to_all_single",
        "_c10d_functional_autograd.all_to_all_single",
    ),
}  # fmt: skip
TORCH_OPS: dict[str, TorchOp] = {
    **{f"aten.{name}": moves for moves, names in _MOVES.items() for name in names},
    **{name: collective for collective, names in _COLLECTIVES.items() for name in names},
    "fsdp.all_gather_copy_in": Moves.SHARD,
    "aten.mm": MatmulOp(),
    "aten.bmm": MatmulOp(),
    "aten.addmm": MatmulOp(first_factor=1),
    "aten.addmm_": MatmulOp(first_factor=1),
    "aten.baddbmm": MatmulOp(first_factor=1),
    "aten._scaled_mm": MatmulOp(is_scaled=True),
    "aten._grouped_mm": MatmulOp(groups="kernel"),
    "aten._scaled_grouped_mm": MatmulOp(groups="kernel", is_scaled=True),
    "meshwright.grouped_matmul_by_loop": MatmulOp(groups="loop"),
    "meshwright.grouped_matmul_by_loop_weight_gradient": MatmulOp(groups="loop over gradients"),
    **{name: AttentionOp(kernel, is_backward=False) for name, kernel in _ATTENTION.items()},
    **{f"{name}_backward": AttentionOp(kernel, is_backward=True) for name, kernel in _ATTENTION.items()},
}
"""By namespace and name."""
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class OpName(NamedTuple):
    """The parts of Signature.op."""

    namespace: str
    name: str
    overload: str


def op_name(op: str) -> OpName:
    """Return the parts of an operator's name; what Inductor fuses has no overload."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    return OpName(namespace, name, overload) if name else OpName(namespace, rest, "")


@cache
def torch_op(op: str) -> TorchOp:
    """Return what the operator of this name (Signature.op) does."""
    namespace, name, overload = op_name(op)
    return TORCH_OPS.get(f"{namespace}.{name}") or (Moves.OVER if overload == "out" else Moves.IN_AND_OUT)


def is_communication(signature: Signature) -> bool:
    """Return whether it is a collective or a message."""
    return op_name(signature.op).namespace in _COMMUNICATION


def is_free(signature: Signature) -> bool:
    """Return whether no kernel runs."""
    return torch_op(signature.op) is Moves.NOTHING


def moved_bytes(signature: Signature) -> float:
    """Return the bytes that a kernel reads and writes."""
    read, written = signature.read_bytes, signature.written_bytes
    match torch_op(signature.op):
        case Moves.NOTHING:
            return 0.0
        case Moves.OUT:
            return float(written)
        case Moves.TWICE_OUT:
            return 2.0 * written
        case Moves.OVER:
            # What is written over is among what the signature calls read.
            return float(max(read, written))
        case Moves.ROWS_OVER:
            return _rows_bytes(signature, 2.0)
        case Moves.ROWS_ADDED:
            return _rows_bytes(signature, 3.0)
        case Moves.SHARD:
            return 2.0 * written * _share_of_first(signature)
        case Moves.IN_PLACE:
            return 2.0 * read
        case Moves.ADAM:
            return (4 + 3) / 4 * read
        case _:
            return float(read + written)


def _share_of_first(signature: Signature) -> float:
    """Return the part of its outputs' elements that the first one has."""
    sizes = [prod(output.dims) for output in signature.outputs]
    return sizes[0] / max(sum(sizes), 1)


def _rows_bytes(signature: Signature, times: float) -> float:
    """Return so many times the bytes of the last input, as the output has them."""
    rows, table = signature.inputs[-1], signature.outputs[0]
    return signature.written_bytes * times * prod(rows.dims) / max(prod(table.dims), 1)
