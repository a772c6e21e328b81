"""encoded(): the tokens of a stream of text, with the next batches in work while one is written."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from meshwright.data.cache.token_file import Tokens
from meshwright.data.formats.readers import Piece

_BATCH_BYTES = 2**19
"""Little: the next batch uses the memory of the last, where that of a large one comes from the kernel each time."""
_NUM_BATCHES_AT_ONCE = min(2 * (os.cpu_count() or 1), 32)
"""Enough for all threads of the tokenizer while the ids of some batches become arrays."""
_MAX_BYTES_AT_ONCE = 2**24
"""A batch is longer than usual where a document is; of text the tokenizer holds some 25 times its size."""


class Encoder(Protocol):
    """What the cache needs of a tokenizer, of text or of conversations."""

    vocab_size: int
    end_of_text: int
    identity: str
    version: str

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text."""
        ...


def encoded(stream: Iterable[Piece], tokenizer: Encoder) -> Iterator[Tokens]:
    """Yield the tokens of a stream in order, with end of text after each document.

    Holds some batches of text, and their tokens, in memory.
    """
    end_of_text = np.array([tokenizer.end_of_text])
    with ThreadPoolExecutor(_NUM_BATCHES_AT_ONCE, thread_name_prefix="meshwright-encode") as pool:
        for batch, runs in _in_order(pool, stream, tokenizer):
            for piece, tokens in zip(batch, runs, strict=True):
                yield tokens
                if piece.ends_document:
                    yield end_of_text


def _in_order(
    pool: ThreadPoolExecutor, stream: Iterable[Piece], tokenizer: Encoder
) -> Iterator[tuple[list[Piece], list[Tokens]]]:
    ahead: deque[tuple[list[Piece], Future[list[Tokens]]]] = deque()
    bytes_ahead = 0
    for batch in batches(stream):
        ahead.append((batch, pool.submit(tokenizer.encode_batch, [piece.text for piece in batch])))
        bytes_ahead += _num_bytes(batch)
        while len(ahead) > _NUM_BATCHES_AT_ONCE or bytes_ahead > _MAX_BYTES_AT_ONCE:
            done, future = ahead.popleft()
            bytes_ahead -= _num_bytes(done)
            yield done, future.result()
    for done, future in ahead:
        yield done, future.result()


def _num_bytes(batch: list[Piece]) -> int:
    return sum(len(piece.utf8) for piece in batch)


def batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces of half a MiB or one long piece more: bounded in memory."""
    batch: list[Piece] = []
    size_bytes = 0
    for piece in stream:
        batch.append(piece)
        size_bytes += len(piece.utf8)
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
