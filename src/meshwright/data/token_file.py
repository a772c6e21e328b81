"""Token file format: a header of 4096 bytes (hash, JSON, zeros), then little-endian tokens."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1

_HEADER_BYTES = 4096
_CHECKSUM_BYTES = 16 * 2**20

Tokens = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Header:
    """Header of a token file."""

    key: str
    """Cache key: hash of content and tokenizer."""
    dtype: str
    num_tokens: int
    checksum: int
    """CRC-32 of the tokens' bytes."""

    def pack(self) -> bytes:
        """Return the header's bytes in the file."""
        text = json.dumps(asdict(self)).encode()
        block = _digest(text) + b"\n" + text
        assert len(block) < _HEADER_BYTES, "the header outgrew its place"
        return block.ljust(_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, block: bytes) -> "Header | None":
        """Return the header in a file's first bytes, or None if they are not what `pack` wrote."""
        digest, _, text = block.rstrip(b"\0").partition(b"\n")
        return cls(**json.loads(text)) if _digest(text) == digest else None


def write_tokens(file: BinaryIO, key: str, dtype: np.dtype[Any], runs: Iterable[Tokens]) -> int:
    """Write all `runs`, then the header that makes the file valid, and return the number of tokens."""
    num_tokens, checksum = 0, 0
    file.truncate(0)
    file.seek(_HEADER_BYTES)
    for run in runs:
        data = run.astype(dtype).tobytes()
        checksum = zlib.crc32(data, checksum)
        num_tokens += len(run)
        file.write(data)
    file.seek(0)
    file.write(Header(key, dtype.str, num_tokens, checksum).pack())
    file.flush()
    return num_tokens


def map_tokens(path: Path, key: str) -> Tokens | None:
    """Return the memory-mapped tokens; None if the file is missing, of another key, or damaged."""
    try:
        with path.open("rb") as file:
            header = Header.unpack(file.read(_HEADER_BYTES))
            size_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    if header is None or header.key != key:
        return None
    if size_bytes != _HEADER_BYTES + header.num_tokens * np.dtype(header.dtype).itemsize:
        return None
    tokens = np.memmap(path, dtype=header.dtype, mode="r", offset=_HEADER_BYTES, shape=(header.num_tokens,))
    # A plain array: slicing a memmap is slow.
    return np.asarray(tokens) if _checksum(tokens) == header.checksum else None


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()


def _checksum(tokens: Tokens) -> int:
    checksum, step = 0, _CHECKSUM_BYTES // tokens.itemsize
    for start in range(0, len(tokens), step):
        checksum = zlib.crc32(tokens[start : start + step].data, checksum)
    return checksum
