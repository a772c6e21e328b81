"""host_values: the one place where a layout reads a tensor's numbers, since the sizes of an exchange are Python ints.

Each call makes the host wait for the device. A program that traces a step with tensors that hold no numbers puts a
model of the routing in its place.
"""

from torch import Tensor


def host_values(tensor: Tensor, kind: str, total: int, rank: int, most: int) -> list[int]:
    """Return the integers that a 1-D tensor holds; `kind` says what they count, `total` how many this rank has of
    it, `most` how many of them one rank can get, and `rank` which of those that exchange it is, for who has to invent
    them.
    """
    values: list[int] = tensor.tolist()
    return values
