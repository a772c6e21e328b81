"""Seconds of collectives by kind, ranks and bytes, as all ranks of this machine make them at the same time.

On a CPU they are what a collective adds to computation, more than it takes alone. An all-reduce is timed twice:
waited for at once, and started next to computation (parallelism/data/replica_sums.py).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.calibrator.timing import SizeGrid, Stopwatch
from meshwright.parallelism.collectives import all_gather_dim, all_reduce_sum, exchange_rows, reduce_scatter_dim
from meshwright.spec.machine.device import CollectiveKind

_BYTES_PER_ELEMENT = 4
_CLOCK_TICK_S = 1e-9
# A matmul of about a millisecond on one core.
_WORK_ROWS, _WORK_WIDTH = 256, 512
_NUM_ASYNC, _WORKS_PER_ASYNC = 4, 3
"""All-reduces of one sample that run next to computation, and matmuls after the start of each: a layer's backward,
long enough for the messages of a small one to arrive."""


def collective_seconds(sizes: SizeGrid, watch: Stopwatch) -> dict[tuple[CollectiveKind, int, int], float]:
    """Return the seconds of each kind of collective, by (kind, ranks, bytes of the whole tensor).

    Ranks are 2, 4, ... and all; groups of fewer ranks run at the same time, like those of a mesh axis.
    """
    took_s = {}
    for num_ranks in _group_sizes(dist.get_world_size()):
        group = _own_group(num_ranks)
        for num_bytes in sizes.collective_bytes:
            for kind, call in _collectives(num_bytes, group, watch.device).items():
                took_s[kind, num_ranks, num_bytes] = _added_s(call, watch)
            if watch.device.type == "cpu":
                took_s["async-all-reduce", num_ranks, num_bytes] = _async_all_reduce_s(num_bytes, group, watch)
    return took_s


def _async_all_reduce_s(num_bytes: int, group: dist.ProcessGroup, watch: Stopwatch) -> float:
    """Return the seconds that an all-reduce adds to the computation after its start; waited for at the end.

    Less than those of one that is waited for at once: others arrive and messages travel meanwhile. What the threads of
    communication compute still takes the time of these cores.
    """
    tensors = [torch.zeros(max(1, num_bytes // _BYTES_PER_ELEMENT)) for _ in range(_NUM_ASYNC)]
    x, weight = torch.randn(_WORK_ROWS, _WORK_WIDTH), torch.randn(_WORK_WIDTH, _WORK_WIDTH)

    def compute() -> None:
        for _ in range(_WORKS_PER_ASYNC):
            x @ weight

    def alone() -> None:
        for _ in tensors:
            compute()

    def both() -> None:
        works = []
        for tensor in tensors:
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
            compute()
        for work in works:
            assert work is not None
            work.wait()

    return max(watch.seconds(both) - watch.seconds(alone), _CLOCK_TICK_S) / _NUM_ASYNC


def _added_s(call: Callable[[], object], watch: Stopwatch) -> float:
    """Return the seconds that a collective adds to computation.

    On a CPU that is more than it takes alone: communication threads share cores with computation, ranks arrive at
    different times, and sent data has left the caches.
    """
    alone_s = watch.seconds(call)
    if watch.device.type != "cpu":
        return alone_s
    x, weight = torch.randn(_WORK_ROWS, _WORK_WIDTH), torch.randn(_WORK_WIDTH, _WORK_WIDTH)

    def both() -> None:
        x @ weight
        call()

    return max(alone_s, watch.seconds(both) - watch.seconds(lambda: x @ weight))


def _group_sizes(num_ranks: int) -> list[int]:
    """Return the powers of two that divide the ranks, and their number itself."""
    sizes = [size for power in range(1, 10) if num_ranks % (size := 2**power) == 0]
    return sorted({*sizes, num_ranks})


def _own_group(num_ranks: int) -> dist.ProcessGroup:
    """Return this rank's group of `num_ranks` consecutive ranks; a collective."""
    firsts = range(0, dist.get_world_size(), num_ranks)
    groups = [dist.new_group(list(range(first, first + num_ranks))) for first in firsts]
    own = groups[dist.get_rank() // num_ranks]
    assert isinstance(own, dist.ProcessGroup)
    return own


def _collectives(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> dict[CollectiveKind, Callable[[], object]]:
    """Return a call of each kind whose whole tensor has `num_bytes`, rounded to a multiple of the ranks."""
    num_ranks = group.size()
    share = max(1, num_bytes // _BYTES_PER_ELEMENT // num_ranks)
    whole, other = (torch.zeros(share * num_ranks, device=device) for _ in range(2))
    rows, each = whole.view(num_ranks, share), [1] * num_ranks
    # Tensor parallelism shards the second dim, the sequence, which needs a copy.
    pairs = max(1, share // 2)
    part_of_two, whole_of_two = (torch.zeros(2, size, device=device) for size in (pairs, pairs * num_ranks))
    return {
        "all-gather": partial(all_gather_dim, part_of_two, 1, group),
        "reduce-scatter": partial(reduce_scatter_dim, whole_of_two, 1, group),
        "all-reduce": partial(all_reduce_sum, whole, group),
        "all-to-all": partial(exchange_rows, rows, each, each, group),
        "send": partial(_send_to_next, whole, other, group),
    }


def _send_to_next(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup) -> None:
    """Send to the next rank of the group and receive from the previous one, like pipeline stages."""
    rank, num_ranks = group.rank(), group.size()
    exchange = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % num_ranks),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % num_ranks),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
