"""moved_bytes: what an operator really moves through memory, by its Moves (op_table.py).

Source: the operators' own definitions. Ignored: what the caches still hold, and broadcast inputs, which count as large
as they are treated.
"""

from math import prod

from meshwright.cost.compute.op_table import Moves, torch_op
from meshwright.spec.trace.trace import Signature


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
