"""Token file format: a header of 4096 bytes (hash, JSON, zeros), then little-endian tokens.

A file is written under a temporary name, then renamed, so that readers see it complete or not at all. The temporary
file is also the lock, so that several processes write it once, and leftovers of a killed process are reused.
"""

import errno
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.log import logger

FORMAT_VERSION = 1

_HEADER_BYTES = 4096
_CHECKSUM_BYTES = 4 * 2**20

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


class TokenFile:
    """A file of tokens that several processes may want, and one of them writes."""

    def __init__(self, path: Path, key: str, dtype: np.dtype[Any]) -> None:
        self.path, self._key, self._dtype = path, key, dtype
        self._partial = path.with_suffix(".partial")

    def open(self) -> Tokens | None:
        """Return the mapped tokens, or None if the file is missing or damaged."""
        return map_tokens(self.path, self._key)

    @property
    def is_complete(self) -> bool:
        """Return whether the file is there with all of its tokens, whose checksum is not computed."""
        return header_of(self.path, self._key) is not None

    def build(self, runs: Callable[[], Iterable[Tokens]], what: str) -> Tokens:
        """Return the mapped tokens after this process has written `runs()`, or another one has written the file.

        `what` says in the log what a process waits for.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with open(os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as partial:
                _lock(partial, what)
                # The previous owner of the lock has renamed the file, or failed and removed it.
                tokens = self.open()
                if tokens is None and self._is_in_place(partial):
                    tokens = self._write(partial, runs())
                elif tokens is not None and self._is_in_place(partial):
                    self._partial.unlink()
                if tokens is not None:
                    return tokens

    def _is_in_place(self, partial: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(partial.fileno()), os.stat(self._partial))
        except FileNotFoundError:
            return False

    def _write(self, partial: BinaryIO, runs: Iterable[Tokens]) -> Tokens:
        if self.path.exists():
            logger.warning("the token cache %s is damaged and is rebuilt", self.path)
        try:
            write_tokens(partial, self._key, self._dtype, runs)
            # Not synced: after a power cut the checksum fails, and the file is rebuilt.
            os.rename(self._partial, self.path)
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise
        tokens = self.open()
        if tokens is None:
            raise OSError(errno.EIO, "data read back differs from data written", str(self.path))
        return tokens


def _lock(partial: BinaryIO, what: str) -> None:
    try:
        fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process to tokenise %s", what)
        fcntl.flock(partial, fcntl.LOCK_EX)


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
    header = header_of(path, key)
    if header is None or _checksum(path) != header.checksum:
        return None
    if not header.num_tokens:
        return np.empty(0, header.dtype)
    tokens = np.memmap(path, dtype=header.dtype, mode="r", offset=_HEADER_BYTES, shape=(header.num_tokens,))
    # A plain array: slicing a memmap is slow.
    return np.asarray(tokens)


def header_of(path: Path, key: str) -> Header | None:
    """Return the header of a complete file, whose tokens are not read; None as map_tokens does."""
    try:
        with path.open("rb") as file:
            header = Header.unpack(file.read(_HEADER_BYTES))
            size_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    if header is None or header.key != key:
        return None
    return header if size_bytes == _HEADER_BYTES + header.num_tokens * np.dtype(header.dtype).itemsize else None


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()


def _checksum(path: Path) -> int:
    """Return the CRC-32 of the tokens in a file, read: mapped pages would count as memory of the process."""
    checksum, buffer = 0, bytearray(_CHECKSUM_BYTES)
    with path.open("rb", buffering=0) as file:
        file.seek(_HEADER_BYTES)
        while num_bytes := file.readinto(buffer):
            checksum = zlib.crc32(memoryview(buffer)[:num_bytes], checksum)
    return checksum
