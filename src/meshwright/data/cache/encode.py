"""encoded(): the tokens of a stream of text, with the next batches in work while one is written."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from meshwright.data.cache.token_file import Tokens
from meshwright.data.formats.readers import Piece

_BATCH_BYTES = 8 * 2**20
_NUM_BATCHES_AT_ONCE = 2
"""While the ids of one batch become an array, which takes one core, the tokenizer's threads work on the next."""


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

    Holds a few batches of some MiB of text, and their tokens, in memory.
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
    for batch in batches(stream):
        ahead.append((batch, pool.submit(tokenizer.encode_batch, [piece.text for piece in batch])))
        if len(ahead) > _NUM_BATCHES_AT_ONCE:
            done, future = ahead.popleft()
            yield done, future.result()
    for done, future in ahead:
        yield done, future.result()


def batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces of a few MiB: enough for a tokenizer's threads, bounded in memory."""
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
