"""moved_bytes: what an operator really moves through memory, where it is not all that it is given and returns.

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

from __future__ import annotations

from collections.abc import Callable

from meshwright.spec.trace.trace import Signature

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
