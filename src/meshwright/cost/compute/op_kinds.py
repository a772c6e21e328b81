"""kind_of_op: what each of torch's operators does, by its exact name without overload.

OPS lists matmuls, attention, and what moves other bytes than its inputs and outputs once. Names are those of torch 2.11
to 2.15 (tests/unit/cost/compute/test_op_kinds.py), of FSDP2, and of the operators of our own trainer and tracer.
"""

from dataclasses import dataclass
from enum import Enum
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


class Moves(Enum):
    """Which bytes an operator moves through memory that is no matmul and no attention."""

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


OpKind = MatmulOp | AttentionOp | Moves

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
OPS: dict[str, OpKind] = {
    **{f"aten.{name}": moves for moves, names in _MOVES.items() for name in names},
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


def op_name(signature: Signature) -> OpName:
    """Return the parts of an operator's name; what Inductor fuses has no overload."""
    namespace, _, rest = signature.op.partition(".")
    name, _, overload = rest.rpartition(".")
    return OpName(namespace, name, overload) if name else OpName(namespace, rest, "")


def kind_of_op(signature: Signature) -> OpKind:
    """Return what an operator does."""
    namespace, name, overload = op_name(signature)
    return OPS.get(f"{namespace}.{name}") or (Moves.OVER if overload == "out" else Moves.IN_AND_OUT)


def is_communication(signature: Signature) -> bool:
    """Return whether it is a collective or a message."""
    return op_name(signature).namespace in _COMMUNICATION


def is_free(signature: Signature) -> bool:
    """Return whether no kernel runs."""
    return kind_of_op(signature) is Moves.NOTHING
