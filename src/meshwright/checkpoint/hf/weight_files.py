"""Weight files of an export: which tensors each of them holds, and their bytes one piece after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.durable import write_durably
from meshwright.checkpoint.hf.folder import INDEX, SINGLE
from meshwright.checkpoint.hf.maps.layouts import PIECE_BYTES, row_ranges, their_shape, to_theirs, written_together
from meshwright.checkpoint.hf.maps.name_map import NameMap, Rename
from meshwright.checkpoint.hf.rounding import rounded
from meshwright.checkpoint.hf.safetensors_writer import write_safetensors
from meshwright.checkpoint.saving import bytes_of
from meshwright.checkpoint.section import SectionReader


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
    for ours in written_together(table, shapes):
        renames = tuple(table.rename_of(name) for name in ours)
        first = ours[0]
        shape = their_shape(renames[0], shapes[first])
        names = table.theirs(first, shapes[first])
        experts = range(len(names)) if renames[0].is_stacked else (None,)
        outputs += [
            OutputTensor(name, dtypes[first], shape, tuple(ours), renames, expert)
            for name, expert in zip(names, experts, strict=True)
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


def write_files(files: Sequence[Sequence[OutputTensor]], saved: SectionReader, folder: Path) -> int:
    """Write the weight files, with an index if there are several, and return the bytes of all tensors."""
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, outputs in enumerate(files, start=1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # Wider dtypes first, so that every tensor is aligned.
        ordered = sorted(outputs, key=lambda output: -output.dtype.itemsize)
        tensors = {output.name: (output.dtype, output.shape) for output in ordered}
        num_bytes += write_safetensors(folder / file, tensors, (bytes_of(data) for data in _pieces(ordered, saved)))
        weight_map |= dict.fromkeys(tensors, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_durably(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return num_bytes


def _pieces(outputs: Sequence[OutputTensor], saved: SectionReader) -> Iterator[Tensor]:
    """Yield the elements of `outputs` in order; at most one fused tensor or about PIECE_BYTES are in memory."""
    for batch in _batches(outputs):
        first = batch[0]
        if first.expert is not None:
            stacked = saved.read(first.ours[0], (first.expert, first.expert + len(batch)))
            for data in stacked:
                yield to_theirs(first.renames, [rounded(data, first.dtype, first.ours[0])])
        elif first.renames[0].keeps_rows:
            for rows in row_ranges(first.renames[0], first.shape, torch.float32.itemsize):
                yield rounded(saved.read(first.ours[0], rows), first.dtype, first.ours[0])
        else:
            yield to_theirs(first.renames, [rounded(saved.read(name), first.dtype, name) for name in first.ours])


def _batches(outputs: Sequence[OutputTensor]) -> Iterator[list[OutputTensor]]:
    """Yield consecutive experts of one of our tensors together, about PIECE_BYTES of them; other tensors alone."""
    batch: list[OutputTensor] = []
    for output in outputs:
        follows = bool(batch) and output.ours == batch[-1].ours
        if batch and not (follows and output.num_bytes * (len(batch) + 1) <= PIECE_BYTES):
            yield batch
            batch = []
        batch.append(output)
    if batch:
        yield batch
