"""Tokens that are stored already, by Megatron-LM or in MDS folders: read in place, without a tokenizer's work."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.data.cache.measured_once import measured_once
from meshwright.data.cache.token_file import Tokens
from meshwright.data.formats.mds import INDEX, MdsTokens, holds_tokens, mds_shards
from meshwright.data.formats.megatron import map_megatron, megatron_files
from meshwright.data.formats.source_file import file_identity, is_url
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError
from meshwright.spec.job.sections import DataSection

_BLOCK_TOKENS = 2**21
_FORMAT = "tokens 1"


class TokenStream(Protocol):
    """Tokens of a corpus, one after another: an array, or what reads parts of files as one."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...

    def __getitem__(self, place: slice, /) -> Tokens:
        """Return the tokens of a range."""
        ...


@dataclass(frozen=True)
class StoredTokens:
    """Tokens up to data.max_bytes, and how many documents they begin."""

    tokens: TokenStream
    num_tokens: int
    num_documents: int
    itemsize: int
    """Bytes of a token in its file."""

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, place: slice) -> Tokens:
        """Return the tokens of a range."""
        start, stop, _ = place.indices(self.num_tokens)
        return self.tokens[start:stop]


def token_files(section: DataSection) -> list[Path] | None:
    """Return the files of a source of tokens; None for another source."""
    if is_url(section.source):
        return None
    path = Path(os.path.expanduser(section.source))
    if (files := megatron_files(path)) is not None:
        return [*files]
    if (path / INDEX).is_file() and holds_tokens(path, section.text_key):
        return [path / INDEX, *mds_shards(path)]
    return None


def open_stored(section: DataSection, files: list[Path]) -> StoredTokens:
    """Return the tokens in `files`, those of `token_files`, up to data.max_bytes; raises DataError if damaged."""
    if files[0].name == INDEX:
        rows = MdsTokens(files[1:], section.text_key)
        itemsize = rows.dtype.itemsize
        num_tokens = min(len(rows), section.max_bytes // itemsize)
        return StoredTokens(rows, num_tokens, rows.num_rows(num_tokens), itemsize)
    found = map_megatron(files[0], files[1])
    itemsize = found.tokens.itemsize
    num_tokens = min(len(found.tokens), section.max_bytes // itemsize)
    return StoredTokens(found.tokens, num_tokens, int((found.first_tokens < num_tokens).sum()), itemsize)


def measured_tokens(section: DataSection, files: list[Path], stored: StoredTokens) -> tuple[str, int]:
    """Return a hash of all tokens, in hex, and the highest, measured once; raises DataError where one is no id."""
    how = [_FORMAT, section.max_bytes, section.text_key, *(file_identity(file) for file in files)]
    name = hashlib.blake2b(json.dumps(how).encode(), digest_size=16).hexdigest()
    path = Path(os.path.expanduser(section.cache_dir)) / "contents" / f"{name}.json"

    def measure() -> dict[str, Any]:
        content_hash, highest = hash_of_tokens(stored, section.source)
        return {"content_hash": content_hash, "highest": highest}

    found = measured_once(path, measure)
    return found["content_hash"], found["highest"]


def hash_of_tokens(stored: StoredTokens, source: str) -> tuple[str, int]:
    """Return a hash of all tokens, in hex, and the highest; raises DataError where one is no id."""
    total = hashlib.blake2b(digest_size=16)
    highest = -1
    for start in range(0, len(stored), _BLOCK_TOKENS):
        block = stored[start : start + _BLOCK_TOKENS]
        if block.min() < 0 or (block.dtype.kind == "f" and (block != np.floor(block)).any()):
            bad = int(np.flatnonzero((block < 0) | (block != np.floor(block)))[0])
            raise DataError(f"data.source = {source!r}: token {start + bad} is {block[bad]}, no id: replace the file")
        highest = max(highest, int(block.max()))
        total.update(block.dtype.str.encode())
        total.update(np.ascontiguousarray(block).tobytes())
    return total.hexdigest(), highest


def missing_ends(section: DataSection, stored: StoredTokens, tokenizer: Tokenizer) -> str | None:
    """Return that no document ends with the tokenizer's end of text, where the job separates documents by it."""
    separates = 'data.packing = "split" and ' * (section.packing != "split") + "data.mask_documents = false"
    first = stored[: min(len(stored), _BLOCK_TOKENS)]
    is_split = section.packing == "split" and not section.mask_documents
    if is_split or stored.num_documents < 2 or (first == tokenizer.end_of_text).any():
        return None
    key = "data.mask_documents = true" if section.packing == "split" else f'data.packing = "{section.packing}"'
    return (
        f"{key} separates documents at token {tokenizer.end_of_text}, the end of text of data.tokenizer, which none of "
        f"the first {len(first)} tokens of data.source = {section.source!r} is: set {separates}, or write the tokens "
        "with an end after each document (--append-eod)"
    )


def foreign_tokens(section: DataSection, highest: int, tokenizer: Tokenizer) -> str | None:
    """Return that the tokens are not those of data.tokenizer; None if they may be."""
    if highest < tokenizer.vocab_size:
        return None
    return (
        f"data.source = {section.source!r} holds token {highest}, but data.tokenizer = {section.tokenizer!r} has "
        f"{tokenizer.vocab_size} tokens: set data.tokenizer to the one that its text was tokenized with"
    )
