"""Packing of whole documents into rows of one length, from their lengths alone.

Best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): the longest document first, each into the
fullest row that has room for it. Documents of one length are placed together, row by row, which gives the same rows as
one by one, so that the time grows with the number of different lengths, not of documents.
"""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

from meshwright.data.order import Indices


def pack_documents(lengths: Indices, capacity: int) -> list[Indices]:
    """Return the documents of each row, ascending; rows in the order of their first documents.

    lengths are those of the documents, each from 1 to `capacity`; no row holds more than that in all.
    """
    assert not lengths.size or 1 <= lengths.min() <= lengths.max() <= capacity, "a document that fits no row"
    row_of, num_rows = _rows_of(lengths, capacity)
    by_row = np.argsort(row_of, kind="stable")
    rows = np.split(by_row, np.cumsum(np.bincount(row_of, minlength=num_rows))[:-1]) if num_rows else []
    return sorted(rows, key=lambda row: int(row[0]))


def one_each(lengths: Indices) -> list[Indices]:
    """Return rows of one document each."""
    return list(np.arange(len(lengths), dtype=np.int64)[:, None])


def _rows_of(lengths: Indices, capacity: int) -> tuple[Indices, int]:
    """Return the row of each document and the number of rows."""
    row_of, num_rows = np.empty(len(lengths), dtype=np.int64), 0
    open_rows = _OpenRows()
    longest_first = np.argsort(-lengths, kind="stable")
    starts = np.flatnonzero(np.diff(lengths[longest_first], prepend=0))
    for documents in np.split(longest_first, starts[1:]) if len(lengths) else []:
        length, placed = int(lengths[documents[0]]), 0
        while placed < len(documents):
            if not open_rows.has_room(length):
                # New rows, as many as these documents fill.
                needed = -(-(len(documents) - placed) // (capacity // length))
                open_rows.add(capacity, np.arange(num_rows, num_rows + needed))
                num_rows += needed
            rows = open_rows.take(length, len(documents) - placed)
            row_of[documents[placed : placed + len(rows)]] = rows
            placed += len(rows)
    return row_of, num_rows


class _OpenRows:
    """Rows with room left, by how much."""

    def __init__(self) -> None:
        self._by_room: defaultdict[int, list[Indices]] = defaultdict(list)
        self._rooms: list[int] = []
        """The keys of `_by_room`, ascending."""

    def add(self, room: int, rows: Indices) -> None:
        """Add rows with this much room each."""
        if not room or not len(rows):
            return
        if room not in self._by_room:
            insort(self._rooms, room)
        self._by_room[room].append(rows)

    def has_room(self, length: int) -> bool:
        """Return whether a document of `length` fits any row."""
        return bool(self._rooms) and self._rooms[-1] >= length

    def take(self, length: int, count: int) -> Indices:
        """Return the rows of up to `count` documents of `length`, all of the least room that is enough."""
        room = self._rooms.pop(bisect_left(self._rooms, length))
        rows = np.concatenate(self._by_room.pop(room))
        each = room // length
        num_full, rest = divmod(min(count, len(rows) * each), each)
        self.add(room, rows[num_full + bool(rest) :])
        self.add(room - each * length, rows[:num_full])
        self.add(room - rest * length, rows[num_full : num_full + bool(rest)])
        return np.concatenate((np.repeat(rows[:num_full], each), np.repeat(rows[num_full : num_full + 1], rest)))
