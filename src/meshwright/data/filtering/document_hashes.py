"""DocumentHashes: the set of hashes by which equal documents are found, in about 22 bytes of memory each."""

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16
_LEAST_RECENT = 2**16
_RECENT_SHARE = 16
"""The newest sixteenth is a Python set, so that the sorted array is rebuilt rarely."""

_PAIR = np.dtype([("high", ">u8"), ("low", ">u8")])


def document_hash(parts: Iterable[bytes]) -> bytes:
    """Return the hash of a document's UTF-8 bytes."""
    total = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        total.update(part)
    return total.digest()


class DocumentHashes:
    """A set of 16-byte hashes: a sorted array of 64-bit halves, and the newest ones."""

    def __init__(self) -> None:
        self._high = np.empty(0, np.uint64)
        self._low = np.empty(0, np.uint64)
        self._recent: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._high) + len(self._recent)

    def add(self, digest: bytes) -> bool:
        """Add a hash, and return whether it is new."""
        if digest in self._recent or self._is_sorted_in(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) > max(_LEAST_RECENT, len(self._high) // _RECENT_SHARE):
            self._merge(b"".join(self._recent))
        return True

    def update(self, digests: bytes) -> None:
        """Add many hashes, none of which is in the set, joined."""
        self._merge(digests + b"".join(self._recent))

    def _is_sorted_in(self, digest: bytes) -> bool:
        high, low = (int.from_bytes(half) for half in (digest[:8], digest[8:]))
        place = int(np.searchsorted(self._high, np.uint64(high)))
        while place < len(self._high) and int(self._high[place]) == high:
            if int(self._low[place]) == low:
                return True
            place += 1
        return False

    def _merge(self, digests: bytes) -> None:
        pairs = np.frombuffer(digests, _PAIR)
        high: npt.NDArray[np.uint64] = pairs["high"].astype(np.uint64)
        order = np.argsort(high)
        high, low = high[order], pairs["low"].astype(np.uint64)[order]
        places = np.searchsorted(self._high, high)
        self._high, self._low = np.insert(self._high, places, high), np.insert(self._low, places, low)
        self._recent.clear()
