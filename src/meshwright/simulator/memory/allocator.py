"""Allocator: a model of torch's caching allocator: allocated and reserved bytes.

    rounding    to 512 bytes
    pools       of each stream two: blocks of up to 1 MiB, and larger ones
    choice      the smallest free block of the pool that fits, the lowest among equals
    merging     a freed block joins its free neighbours in the segment

Fixed segments, torch's default:

    segments    cudaMalloc of 2 MiB for up to 1 MiB, 20 MiB for less than 10 MiB, else rounded up to 2 MiB
    splitting   a rest becomes a block: from 512 bytes in the small pool, of over 1 MiB in the large pool
    release     if a new segment would not fit: every segment without a live block

Expandable segments, as the trainer sets them (spec/machine/allocator_settings.py):

    segments    one per pool, with more addresses than the device has memory, mapped in pages of 2 or 20 MiB
    choice      the free block at the end of the mapped pages comes last, since it can still grow
    splitting   a rest of at least 512 bytes becomes a block
    growth      into the first unmapped addresses that are wide enough, with the free block before them
    release     if new pages would not fit: every page without a live byte

Source: c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13, and its documentation of PYTORCH_ALLOC_CONF, other settings
at their defaults. Ignored: blocks that another stream still uses (record_stream, which neither FSDP2 nor our pipeline
calls), memory of graphs, and the addresses that the driver gives: new segments lie above all others.
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
_ADDRESSES = 20 * _MIB << 22
"""Of an expandable segment: more than any device has, in whole pages."""

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
    is_mapped: bool = True
    """Whether its addresses have memory; only in expandable segments they may not."""


class Allocator:
    """A device's memory as torch's caching allocator manages it."""

    def __init__(self, capacity_bytes: int | None = None, *, is_expandable: bool = False) -> None:
        """Take the device's capacity; with None, cached memory is never released."""
        self.allocated_bytes = 0
        """In live blocks, rounded up."""
        self.reserved_bytes = 0
        """In segments, or in mapped pages."""
        self._capacity_bytes, self._is_expandable = capacity_bytes, is_expandable
        self._live: dict[int, _Block] = {}
        self._free: dict[Pool, list[tuple[int, int]]] = {}
        """Of each pool the size and start of free mapped blocks, smallest first."""
        self._free_blocks: dict[int, _Block] = {}
        self._unmapped: dict[Pool, dict[int, _Block]] = {}
        """Of each pool the blocks without memory, by their start."""
        self._top = 0

    @property
    def live(self) -> dict[int, int]:
        """Return start and size of every live block."""
        return {start: block.size for start, block in self._live.items()}

    def allocate(self, num_bytes: int, stream: int = 0) -> int:
        """Return the start of a new block of at least `num_bytes`, which is not 0."""
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        pool = (stream, size <= _SMALL)
        block = self._take(pool, size) or (self._expand if self._is_expandable else self._segment)(pool, size)
        self._split(block, size)
        block.is_free = False
        self._live[block.start] = block
        self.allocated_bytes += block.size
        return block.start

    def free(self, start: int) -> None:
        """Free the block that starts at `start`."""
        block = self._live.pop(start)
        self.allocated_bytes -= block.size
        block.is_free = True
        self._remember(block)

    def release_cached(self) -> None:
        """Return unused memory to the device, as torch.cuda.empty_cache() does."""
        for block in [*self._free_blocks.values()]:
            if self._is_expandable:
                self._unmap(block)
            elif block.before is None and block.after is None:
                self._forget(block)
                self.reserved_bytes -= block.size

    def _take(self, pool: Pool, size: int) -> _Block | None:
        """Remove and return the best free block; None if none fits."""
        free = self._free.get(pool, [])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        if self._can_grow(self._free_blocks[free[at][1]]) and at + 1 < len(free):
            at += 1
        return self._free_blocks.pop(free.pop(at)[1])

    def _can_grow(self, block: _Block) -> bool:
        return block.after is not None and not block.after.is_mapped

    def _segment(self, pool: Pool, size: int) -> _Block:
        """Return a free block that is a segment of its own."""
        segment = _segment_bytes(size)
        self._make_room(segment)
        block = _Block(self._top, segment, pool)
        self._top += segment
        self.reserved_bytes += segment
        return block

    def _expand(self, pool: Pool, size: int) -> _Block:
        """Return a free block of the pool's expandable segment, made large enough."""
        needed = self._pages(pool, size - self._free_before(self._place(pool, size)))
        self._make_room(needed)
        block = self._place(pool, size)
        while not block.is_mapped or block.size < size:
            unmapped = block if not block.is_mapped else block.after
            assert unmapped is not None
            has = 0 if unmapped is block else block.size
            block = self._map(unmapped, size - has)
        self._forget(block)
        return block

    def _place(self, pool: Pool, size: int) -> _Block:
        """Return the first block of the lowest free addresses, some of them unmapped, that are wide enough."""
        unmapped = self._unmapped.setdefault(pool, {})
        for start in sorted(unmapped):
            first = unmapped[start]
            if first.before is not None and first.before.is_free:
                first = first.before
            width, block = 0, first
            while width < size and block.is_free:
                width += block.size
                if block.after is None:
                    break
                block = block.after
            if width >= size:
                return first
        fresh = _Block(self._top, _ADDRESSES, pool, is_mapped=False)
        unmapped[fresh.start] = fresh
        self._top += 2 * _ADDRESSES
        return fresh

    def _free_before(self, block: _Block) -> int:
        return block.size if block.is_mapped else 0

    def _pages(self, pool: Pool, size: int) -> int:
        """Return the bytes of the pages that `size` takes."""
        page = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        return -(-size // page) * page

    def _map(self, block: _Block, size: int) -> _Block:
        """Map the first `size` bytes of an unmapped block, and return the free block that has them."""
        size = min(self._pages(block.pool, size), block.size)
        unmapped = self._unmapped[block.pool]
        del unmapped[block.start]
        if size < block.size:
            rest = self._cut(block, size)
            unmapped[rest.start] = rest
        block.is_mapped = True
        self.reserved_bytes += size
        return self._remember(block)

    def _unmap(self, block: _Block) -> None:
        """Unmap the whole pages in a free block."""
        page = _SMALL_SEGMENT if block.pool[1] else _LARGE_SEGMENT
        first, stop = -(-block.start // page) * page, (block.start + block.size) // page * page
        if first >= stop:
            return
        self._forget(block)
        if first > block.start:
            low, block = block, self._cut(block, first - block.start)
            self._list(low)
        if stop < block.start + block.size:
            self._list(self._cut(block, stop - block.start))
        self.reserved_bytes -= block.size
        block.is_mapped = False
        unmapped = self._unmapped[block.pool]
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.is_mapped:
                del unmapped[neighbour.start]
        block = self._merged(block)
        unmapped[block.start] = block

    def _make_room(self, more: int) -> None:
        if self._capacity_bytes is not None and self.reserved_bytes + more > self._capacity_bytes:
            self.release_cached()

    def _split(self, block: _Block, size: int) -> None:
        """Shrink the block to `size` bytes; the rest becomes a free block if it is large enough."""
        rest = block.size - size
        if rest < _ROUNDING if block.pool[1] or self._is_expandable else rest <= _SMALL:
            return
        self._list(self._cut(block, size))

    def _cut(self, block: _Block, size: int) -> _Block:
        """Shrink the block to `size` bytes, and return a new one of the rest."""
        other = _Block(block.start + size, block.size - size, block.pool, block, block.after, is_mapped=block.is_mapped)
        if block.after is not None:
            block.after.before = other
        block.after, block.size = other, size
        return other

    def _merged(self, block: _Block) -> _Block:
        """Return a free block merged with its free neighbours, mapped or unmapped like itself."""
        low, high = block.before, block.after
        if high is not None and high.is_free and high.is_mapped == block.is_mapped:
            self._join(block, high)
        if low is not None and low.is_free and low.is_mapped == block.is_mapped:
            self._join(low, block)
            return low
        return block

    def _join(self, low: _Block, high: _Block) -> None:
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low

    def _remember(self, block: _Block) -> _Block:
        """List a block as free, merged with its free neighbours, and return it."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free and neighbour.is_mapped:
                self._forget(neighbour)
        block = self._merged(block)
        self._list(block)
        return block

    def _list(self, block: _Block) -> None:
        insort(self._free.setdefault(block.pool, []), (block.size, block.start))
        self._free_blocks[block.start] = block

    def _forget(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.start))]
        del self._free_blocks[block.start]


def _segment_bytes(size: int) -> int:
    """Return the size of the segment that is allocated for a block of `size`."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_ROUNDING) * _SEGMENT_ROUNDING
