"""kernel_bytes: what a fused kernel of Inductor moves, of each buffer no more than what its accesses touch.

Inductor counts a buffer that is indexed by data as read or written whole, since the data may name any part of it. An
embedding's gradient would then move its table twice, for the rows of a few thousand tokens. Of fused operators it also
counts buffers whole of which they read a slice: a norm would move the weights of all its block, which a graph with its
collectives gathers into one buffer. Here a buffer counts what the kernel's ranges touch, no more than all of it, and
twice where it is added to by data. Private parts of torch; checked in 2.13.
"""

import math
from collections import defaultdict
from typing import Any

from torch._inductor.dependencies import Dep, MemoryDep
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.utils import get_dtype_size
from torch._inductor.virtualized import V

_ADDED = "atomic_add"


def kernel_bytes(step: BaseSchedulerNode) -> int:
    """Return the bytes that a step reads and writes; to be asked while its graph is lowered."""
    accesses: dict[str, list[Dep]] = defaultdict(list)
    for dep in (*step.read_writes.reads, *step.read_writes.writes):
        accesses[dep.name].append(dep)
    found = step.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    return int(sum(min(whole, _touched_bytes(accesses[name], whole)) for name, whole in found.items()))


def _touched_bytes(deps: list[Dep], whole_bytes: int) -> int:
    """Return the bytes that accesses of one buffer touch, at most; `whole_bytes` where that is not known."""
    touched = 0
    for dep in deps:
        mode, sizes = getattr(dep, "mode", None), getattr(dep, "size", ())
        if mode == _ADDED and not isinstance(dep, MemoryDep):
            # The buffer that is added to, under its earlier name: the write counts for both.
            continue
        if not isinstance(dep, MemoryDep) or not all(map(_is_known, sizes)):
            return whole_bytes
        # Without data as an index, what is read once for several elements counts once.
        elements = math.prod(int(size) for size in sizes) if dep.is_indirect() else int(dep.get_numel())
        touched += elements * get_dtype_size(V.graph.get_dtype(dep.name)) * (2 if mode == _ADDED else 1)
    return touched


def _is_known(size: Any) -> bool:
    """Return whether a size is a number, not a symbol of dynamic shapes."""
    return bool(getattr(size, "is_number", True))
