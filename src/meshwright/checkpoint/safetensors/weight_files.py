"""Weight files of an export: which tensors each of them holds, and their bytes one piece after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.format.durable import write_durably
from meshwright.checkpoint.hf.maps.layouts import (
    PIECE_BYTES,
    row_ranges,
    share_of,
    to_theirs,
    written_together,
)
from meshwright.checkpoint.hf.output_folder import NewFolder
from meshwright.checkpoint.safetensors.rounding import rounded
from meshwright.checkpoint.safetensors.safetensors_file import create, safetensors_header, write_at
from meshwright.checkpoint.safetensors.weight_index import INDEX, SINGLE
from meshwright.checkpoint.saving import bytes_of
from meshwright.checkpoint.section import SectionReader
from meshwright.spec.model.hf.name_map import NameMap, Rename


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of theirs and what it is made of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    """Our tensor, or its parts in order."""
    renames: tuple[Rename, ...]
    """Row of the name map of each of ours."""
    expert: int | None = None
    """Index in our stacked tensor."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes in a file."""
        return prod(self.shape) * self.dtype.itemsize


def output_tensors(
    table: NameMap, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> list[OutputTensor]:
    """Return all tensors of theirs in the model's order; `dtypes` are those of the files, by our names."""
    outputs = []
    for theirs, made_of in written_together(table, shapes).items():
        ours, renames = zip(*made_of, strict=True)
        shape, dtype = renames[0].their_shape(shapes[ours[0]]), dtypes[ours[0]]
        experts = range(shapes[ours[0]][0]) if renames[0].is_stacked else (None,)
        outputs += [
            OutputTensor(theirs.replace("{e}", str(expert)), dtype, shape, ours, renames, expert) for expert in experts
        ]
    return outputs


def divide(outputs: Sequence[OutputTensor], max_bytes: int) -> list[list[OutputTensor]]:
    """Return the tensors of each file: at most `max_bytes` of them, or a single larger one."""
    files: list[list[OutputTensor]] = [[]]
    room = max_bytes
    for output in outputs:
        if files[-1] and output.num_bytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(output)
        room -= output.num_bytes
    return files


class ConvertedPiece(NamedTuple):
    """Bytes of one weight file that are read, converted and written at once."""

    start: int
    """Offset in the file."""
    outputs: list[OutputTensor]
    """One tensor, or consecutive experts of one of ours."""
    rows: tuple[int, int] | None
    """Rows of dim 0 of ours, experts if it stacks them; None for all of tensors whose rows move."""
    num_bytes: int


class WeightFile(NamedTuple):
    """One file of an export, before its tensors are written."""

    path: Path
    header: bytes
    outputs: list[OutputTensor]
    """Its tensors, in order."""

    @classmethod
    def of(cls, folder: Path, number: int, num_files: int, outputs: Sequence[OutputTensor]) -> WeightFile:
        """Return file `number`, from 1 on, of `num_files` with these tensors."""
        name = SINGLE if num_files == 1 else f"model-{number:05d}-of-{num_files:05d}.safetensors"
        # Wider dtypes first, so that every tensor is aligned.
        ordered = sorted(outputs, key=lambda output: -output.dtype.itemsize)
        header = safetensors_header({output.name: (output.dtype, output.shape) for output in ordered})
        return cls(folder / name, header, ordered)

    def pieces(self) -> Iterator[ConvertedPiece]:
        """Yield all tensors piece by piece, in order."""
        start = len(self.header)
        for batch in _batches(self.outputs):
            first = batch[0]
            if first.expert is not None:
                ranges: list[tuple[int, int] | None] = [(first.expert, first.expert + len(batch))]
            elif first.renames[0].keeps_rows:
                ranges = [*row_ranges(first.renames[0], first.shape, torch.float32.itemsize)]
            else:
                ranges = [None]
            num_bytes = sum(output.num_bytes for output in batch)
            for rows in ranges:
                share = num_bytes
                if rows is not None and first.expert is None and first.shape:
                    share = num_bytes // first.shape[0] * (rows[1] - rows[0])
                yield ConvertedPiece(start, batch, rows, share)
                start += share


def write_files(files: Sequence[Sequence[OutputTensor]], saved: SectionReader, folder: NewFolder) -> int:
    """Write the weight files, with an index if there are several, and return the bytes of all tensors.

    A collective: each of the folder's ranks reads and writes an equal share of the bytes.
    """
    planned = [WeightFile.of(folder.path, number, len(files), outputs) for number, outputs in enumerate(files, start=1)]
    folder.write(lambda: _create(planned, folder.path), on_rank=0)
    pieces = [(file, piece) for file in planned for piece in file.pieces()]
    sizes = [piece.num_bytes for _, piece in pieces]
    own = [pieces[i] for i in share_of(sizes, folder.peers.rank, folder.peers.num_ranks)]
    folder.write(lambda: _write(own, saved))
    return sum(sizes)


def _create(files: Sequence[WeightFile], folder: Path) -> None:
    for file in files:
        create(file.path, file.header, sum(output.num_bytes for output in file.outputs))
    if len(files) > 1:
        weight_map = {output.name: file.path.name for file in files for output in file.outputs}
        num_bytes = sum(output.num_bytes for file in files for output in file.outputs)
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_durably(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _write(pieces: Iterable[tuple[WeightFile, ConvertedPiece]], saved: SectionReader) -> None:
    """Write these pieces durably; at most one fused tensor or about PIECE_BYTES are in memory."""
    for file, of_file in groupby(pieces, key=itemgetter(0)):
        with file.path.open("r+b", buffering=0) as opened:
            for _, piece in of_file:
                start = piece.start
                for data in _tensors(piece, saved):
                    write_at(opened.fileno(), bytes_of(data), start)
                    start += data.nbytes
            os.fsync(opened.fileno())


def _tensors(piece: ConvertedPiece, saved: SectionReader) -> Iterator[Tensor]:
    first = piece.outputs[0]
    if first.expert is not None:
        for parts in zip(*(saved.read(name, piece.rows) for name in first.ours), strict=True):
            named = zip(parts, first.ours, strict=True)
            yield to_theirs(first.renames, [rounded(data, first.dtype, name) for data, name in named])
    else:
        yield to_theirs(
            first.renames, [rounded(saved.read(name, piece.rows), first.dtype, name) for name in first.ours]
        )


def _batches(outputs: Sequence[OutputTensor]) -> Iterator[list[OutputTensor]]:
    """Yield consecutive experts of one of our tensors together, about PIECE_BYTES of them; other tensors alone."""
    batch: list[OutputTensor] = []
    for output in outputs:
        follows = bool(batch) and (output.ours, output.renames) == (batch[-1].ours, batch[-1].renames)
        if batch and not (follows and output.num_bytes * (len(batch) + 1) <= PIECE_BYTES):
            yield batch
            batch = []
        batch.append(output)
    if batch:
        yield batch
