"""Allocator: what torch's caching allocator makes of allocations and frees: bytes handed out, and bytes held.

    rounding    to 512 bytes
    segments    what is asked of the device: 2 MiB for up to 1 MiB, 20 MiB for less than 10 MiB, else to 2 MiB
    choice      the smallest free block of the same stream and pool (small, large) that fits, the lowest among equals
    splitting   what is left over becomes a block: of at least 512 bytes in the small pool, of over 1 MiB in the large
    merging     a freed block joins its free neighbours in the segment
    giving back only where a new segment would not fit: every segment without a live block
    expandable  one segment for each stream and pool that grows at its end, by 2 MiB or 20 MiB at a time

Source: the behaviour that PyTorch's documentation on CUDA memory management describes (PYTORCH_CUDA_ALLOC_CONF), with
its defaults. Ignored: blocks that another stream still uses (record_stream), memory of graphs, and the addresses that
the driver gives: new segments lie above all others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 1 << 20
_ROUNDING = 512
_SMALL = _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
_SEGMENT_ROUNDING = 2 * _MIB
_APART = 1 << 50
"""Between expandable segments: more than any device has."""

Pool = tuple[int, bool]
"""A stream, and whether it is the pool of small blocks."""


@dataclass
class _Block:
    start: int
    size: int
    pool: Pool
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = True


class Allocator:
    """A device's memory as torch hands it out."""

    def __init__(self, capacity_bytes: int | None = None, *, is_expandable: bool = False) -> None:
        """Take what the device has; None never gives back."""
        self.allocated_bytes = 0
        """In blocks that are handed out, rounded up."""
        self.reserved_bytes = 0
        """In segments."""
        self._capacity_bytes, self._is_expandable = capacity_bytes, is_expandable
        self._live: dict[int, _Block] = {}
        self._free: dict[Pool, list[tuple[int, int]]] = {}
        """Of each pool the size and start of free blocks, smallest first."""
        self._free_blocks: dict[int, _Block] = {}
        self._last: dict[Pool, _Block] = {}
        """The block at the end of each expandable segment."""
        self._top = 0

    @property
    def live(self) -> dict[int, int]:
        """Return start and size of every block that is handed out."""
        return {start: block.size for start, block in self._live.items()}

    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        """Return the start of a new block of at least `num_bytes`, which is not 0."""
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        pool = (stream, size <= _SMALL)
        block = self._take(pool, size) or self._grow(pool, size)
        self._split(block, size)
        block.is_free = False
        self._live[block.start] = block
        self.allocated_bytes += block.size
        return block.start

    def free(self, start: int) -> None:
        """Take back the block that starts there."""
        block = self._live.pop(start)
        self.allocated_bytes -= block.size
        block.is_free = True
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._forget(before)
            block = self._joined(before, block)
        if after is not None and after.is_free:
            self._forget(after)
            block = self._joined(block, after)
        self._remember(block)

    def give_back(self) -> None:
        """Return to the device every segment that nothing is in, as torch.cuda.empty_cache() does."""
        for block in [*self._free_blocks.values()]:
            if block.before is None and block.after is None:
                self._forget(block)
                self.reserved_bytes -= block.size
                if self._last.get(block.pool) is block:
                    del self._last[block.pool]

    def _take(self, pool: Pool, size: int) -> _Block | None:
        """Return the best free block, which is free no more; None if none fits."""
        free = self._free.get(pool, [])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        return self._free_blocks.pop(free.pop(at)[1])

    def _grow(self, pool: Pool, size: int) -> _Block:
        """Return a free block from new memory of the device."""
        if self._is_expandable:
            return self._expand(pool, size)
        segment = _segment_bytes(size)
        self._make_room(segment)
        block = _Block(self._top, segment, pool)
        self._top += segment
        self.reserved_bytes += segment
        return block

    def _expand(self, pool: Pool, size: int) -> _Block:
        """Return the free end of the pool's one segment, made large enough."""
        last = self._last.get(pool)
        more = _missing_bytes(last, size)
        self._make_room(more)
        if self._last.get(pool) is not last:
            last, more = None, _missing_bytes(None, size)
        self.reserved_bytes += more
        if last is not None and last.is_free:
            self._forget(last)
            last.size += more
            return last
        if last is None:
            self._top += _APART
            block = _Block(self._top, more, pool)
        else:
            block = _Block(last.start + last.size, more, pool, before=last)
            last.after = block
        self._last[pool] = block
        return block

    def _make_room(self, more: int) -> None:
        if self._capacity_bytes is not None and self.reserved_bytes + more > self._capacity_bytes:
            self.give_back()

    def _split(self, block: _Block, size: int) -> None:
        """Leave the block `size` bytes and make the rest another, if it is worth it."""
        rest = block.size - size
        if rest < _ROUNDING if block.pool[1] else rest <= _SMALL:
            return
        other = _Block(block.start + size, rest, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.after, block.size = other, size
        if self._last.get(block.pool) is block:
            self._last[block.pool] = other
        self._remember(other)

    def _joined(self, low: _Block, high: _Block) -> _Block:
        """Return two neighbours as one."""
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        if self._last.get(high.pool) is high:
            self._last[low.pool] = low
        return low

    def _remember(self, block: _Block) -> None:
        insort(self._free.setdefault(block.pool, []), (block.size, block.start))
        self._free_blocks[block.start] = block

    def _forget(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.start))]
        del self._free_blocks[block.start]


def _missing_bytes(last: _Block | None, size: int) -> int:
    """Return what an expandable segment that ends in `last` lacks for a block of `size` at its end."""
    unit = _SMALL_SEGMENT if size <= _SMALL else _LARGE_SEGMENT
    has = last.size if last is not None and last.is_free else 0
    return -(-(size - has) // unit) * unit


def _segment_bytes(size: int) -> int:
    """Return what is asked of the device for a block of `size`."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
