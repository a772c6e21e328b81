"""Routing: how many tokens go where, while no tensor holds a number."""

from __future__ import annotations

from torch import Tensor


def balanced(tensor: Tensor, kind: str, total: int) -> list[int]:
    """Return the rows sent to each rank and received from each, `total` of both, as evenly as whole numbers can be.

    Stands in for parallelism.host_values; `tensor` has an element for each rank, twice.
    """
    num_ranks = len(tensor) // 2
    share, more = divmod(total, num_ranks)
    return 2 * [share + (rank < more) for rank in range(num_ranks)]
