"""torch's caching allocator: sizes that its documentation gives, and what must hold for any program."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.simulator.memory.allocator import Allocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # What is left of 12 MiB is too little for a block of its own.
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
        (12 * MIB, 12 * MIB, 12 * MIB),
    ],
)
def test_sizes_are_rounded_and_segments_taken_as_documented(num_bytes: int, allocated: int, reserved: int) -> None:
    allocator = Allocator()
    allocator.allocate(num_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_a_freed_block_is_used_again_on_its_own_stream_only() -> None:
    allocator = Allocator()
    first = allocator.allocate(16 * MIB, stream=0)
    allocator.free(first)
    allocator.allocate(16 * MIB, stream=1)
    assert allocator.reserved_bytes == 32 * MIB
    assert allocator.allocate(16 * MIB, stream=0) == first
    assert allocator.reserved_bytes == 32 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = Allocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(18 * MIB) == small


def test_neighbours_merge_and_hold_what_neither_held() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    assert allocator.allocate(9 * MIB) == blocks[1]
    assert allocator.reserved_bytes == 20 * MIB


def test_fragments_hold_memory_that_nobody_can_use() -> None:
    def asked_for(allocator: Allocator) -> int:
        blocks = [allocator.allocate(30 * MIB) for _ in range(4)]
        for block in blocks[::2]:
            allocator.free(block)
        allocator.allocate(50 * MIB)
        return allocator.reserved_bytes

    assert asked_for(Allocator()) == 170 * MIB
    # What does not fit is given back first.
    assert asked_for(Allocator(capacity_bytes=160 * MIB)) == 110 * MIB


def test_an_expandable_segment_grows_at_its_end() -> None:
    allocator = Allocator(is_expandable=True)
    blocks = [allocator.allocate(30 * MIB) for _ in range(2)]
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(blocks[1])
    assert allocator.allocate(50 * MIB) == blocks[1]
    assert allocator.reserved_bytes == 80 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = Allocator(is_expandable=True)
    wide, _, end = (allocator.allocate(size * MIB) for size in (60, 20, 40))
    allocator.free(wide)
    allocator.free(end)
    assert allocator.allocate(30 * MIB) == wide
    # A block of fixed segments would go to the smallest that holds it.
    fixed = Allocator()
    wide, end = fixed.allocate(60 * MIB), fixed.allocate(40 * MIB)
    fixed.free(wide)
    fixed.free(end)
    assert fixed.allocate(30 * MIB) == end


def test_pages_without_a_live_byte_are_given_back_from_within_an_expandable_segment() -> None:
    allocator = Allocator(200 * MIB, is_expandable=True)
    blocks = [allocator.allocate(50 * MIB) for _ in range(4)]
    allocator.free(blocks[1])
    other = allocator.allocate(40 * MIB, stream=1)
    # Of 50 free MiB from 50 to 100 the pages from 60 to 100 are whole.
    assert allocator.reserved_bytes == 200 * MIB
    allocator.free(other)
    allocator.allocate(45 * MIB)
    assert allocator.allocated_bytes == 195 * MIB
    assert allocator.reserved_bytes == 200 * MIB


def test_what_is_left_of_a_block_of_an_expandable_segment_is_used() -> None:
    allocator = Allocator(is_expandable=True)
    allocator.allocate(20 * MIB - MIB // 2 * 3)
    allocator.allocate(MIB * 3 // 2)
    assert allocator.reserved_bytes == 20 * MIB


ACTIONS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 30 * MIB) | st.integers(1, 4096), st.integers(0, 2)), max_size=120
)


@given(actions=ACTIONS, is_expandable=st.booleans(), capacity=st.none() | st.just(64 * MIB))
def test_any_program_gets_blocks_of_its_own_and_gives_all_back(
    actions: list[tuple[bool, int, int]], is_expandable: bool, capacity: int | None
) -> None:
    allocator = Allocator(capacity, is_expandable=is_expandable)
    live: list[int] = []
    asked: dict[int, int] = {}
    for is_free, num_bytes, stream in actions:
        if is_free and live:
            block = live.pop(num_bytes % len(live))
            allocator.free(block)
            del asked[block]
        else:
            live.append(allocator.allocate(num_bytes, stream))
            asked[live[-1]] = num_bytes
        blocks = sorted(allocator.live.items())
        assert all(start + size <= after for (start, size), (after, _) in pairwise(blocks))
        assert all(allocator.live[start] >= size for start, size in asked.items())
        assert sum(size for _, size in blocks) == allocator.allocated_bytes <= allocator.reserved_bytes
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.release_cached()
    assert allocator.reserved_bytes == 0
    # What was given back is taken again as it was at first.
    assert allocator.allocate(30 * MIB) >= 0
    assert allocator.reserved_bytes in (30 * MIB, 40 * MIB)
