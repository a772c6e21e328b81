"""The only device-to-host sync of a layout: the split sizes of an all-to-all are Python ints.

The tracer, whose fake tensors hold no values, replaces it by a model of the routing.
"""

from torch import Tensor


def read_on_host(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
    """Return the integers of a 1-D tensor. The other arguments are for the tracer's model.

    `kind` says what the integers count, `total` how many this rank has, `most` how many one rank can get, `rank` is
    this rank in the group.
    """
    values: list[int] = tensor.tolist()
    return values
