"""Storage reader: finds each shard of a tensor, verifies its hash and copies it in place."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from meshwright.checkpoint.contents import Contents, StoredShard, StoredTensor, hash_bytes, remedy
from meshwright.errors import CheckpointError


def read_chunk(folder: Path, name: str, stored: StoredTensor, chunk: StoredShard) -> Tensor:
    """Return one shard of the tensor `name`; raises CheckpointError if its hash does not match."""
    path = folder / chunk.file
    data = bytearray(chunk.num_bytes)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(chunk.start)
            num_read = _read_into(file, memoryview(data))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {remedy(folder)}") from error
    if num_read < chunk.num_bytes or hash_bytes(data) != chunk.xxh3_128:
        raise CheckpointError(
            f"{path} is damaged: bytes {chunk.start} to {chunk.start + chunk.num_bytes} "
            f"({name} at {list(chunk.offsets)}) do not match their hash: {remedy(folder)}"
        )
    return torch.frombuffer(data, dtype=stored.torch_dtype).view(chunk.shape)


def file_problems(folder: Path, contents: Contents, names: Iterable[str]) -> list[str]:
    """Return the problems of the files `names` that are missing or of another size, without reading them."""
    problems = []
    for name in names:
        expected = contents.file_bytes[name]
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            problems.append(f"{folder / name} is missing ({error.strerror}): {remedy(folder)}")
            continue
        if size != expected:
            problems.append(f"{folder / name} has {size} bytes, {expected} were saved: {remedy(folder)}")
    return problems


class Reader(StorageReader):
    """Reader of one checkpoint; torch.distributed.checkpoint calls the methods in this order."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self._folder = folder
        self._contents = contents
        self._chunks = {
            (name, chunk.offsets): chunk for name, stored in contents.tensors.items() for chunk in stored.chunks
        }

    def read_metadata(self) -> Metadata:
        """Return the shapes of all tensors and their shards, for the planner."""
        return Metadata({name: _tensor_metadata(stored) for name, stored in self._contents.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the constructor has the contents."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned shards into this rank's tensors, reading each stored shard once."""
        items_by_chunk: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            items_by_chunk.setdefault(item.storage_index, []).append(item)
        for index, items in items_by_chunk.items():
            stored, chunk = self._contents.tensors[index.fqn], self._chunks[index.fqn, tuple(index.offset or ())]
            data = read_chunk(self._folder, index.fqn, stored, chunk)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(_narrow(data, item))
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any folder will do."""
        return True


def _tensor_metadata(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in stored.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=stored.torch_dtype), torch.Size(stored.shape), chunks)


def _narrow(data: Tensor, item: ReadItem) -> Tensor:
    box = tuple(slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths, strict=True))
    return data[box]


def _read_into(file: Any, view: memoryview) -> int:
    """Fill `view` in as many reads as needed and return the number of bytes read."""
    num_read = 0
    while num_read < len(view):
        count = file.readinto(view[num_read:])
        if not count:
            break
        num_read += count
    return num_read
