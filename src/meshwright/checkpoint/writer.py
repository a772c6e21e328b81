"""Storage writer: each rank's file, then checkpoint.json and the rename on rank 0."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.checkpoint.contents import (
    Contents,
    StoredShard,
    StoredTensor,
    contents_to_text,
    dtype_name,
    hash_bytes,
)
from meshwright.checkpoint.durable import commit, remove, remove_stale, temporary_sibling, write_durably
from meshwright.checkpoint.find_checkpoint import FILE_NAME
from meshwright.errors import CheckpointError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writer(StorageWriter):
    """Writer of one checkpoint; torch.distributed.checkpoint calls the methods in this order.

    An error in any of them on any rank is raised on all ranks.
    """

    def __init__(self, folder: Path, metadata: dict[str, Any]) -> None:
        self._folder = folder
        self._metadata = metadata
        self._temporary = temporary_sibling(folder)
        self._is_first = False

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Create the temporary folder on rank 0, before any rank writes."""
        self._is_first = is_coordinator
        if not is_coordinator:
            return
        json.dumps(self._metadata)
        try:
            if self._folder.exists():
                raise CheckpointError(
                    f"{self._folder} exists, and checkpoints are never overwritten: "
                    "resume from it, or move it away before saving this step again"
                )
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self._folder.parent)
            self._temporary.mkdir()
        except OSError as error:
            raise self._explain(error) from error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank its file in the temporary folder."""
        places = [(self._temporary, f"rank-{rank:05d}.bin") for rank in range(len(plans))]
        return [replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards to its file, durably, and return where each is."""
        temporary, name = plan.storage_data
        results = []
        try:
            with (temporary / name).open("xb") as file:
                for item in plan.items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, Tensor)
                    results.append(_write(file, name, item, tensor))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._explain(error) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write checkpoint.json and commit the folder."""
        chunks: dict[str, list[StoredShard]] = {name: [] for name in metadata.state_dict_metadata}
        file_bytes: dict[str, int] = {}
        for result in (result for of_rank in results for result in of_rank):
            chunk = result.storage_data
            file_bytes[chunk.file] = max(file_bytes.get(chunk.file, 0), chunk.start + chunk.num_bytes)
            if chunk.num_bytes:
                chunks[result.index.fqn].append(chunk)
        contents = Contents(
            save_id=self._temporary.name.rpartition("-")[2],
            metadata=self._metadata,
            file_bytes=file_bytes,
            tensors={
                name: _stored(stored, chunks[name]) for name, stored in sorted(metadata.state_dict_metadata.items())
            },
        )
        try:
            write_durably(self._temporary / FILE_NAME, contents_to_text(contents))
            commit(self._temporary, self._folder)
        except OSError as error:
            raise self._explain(error) from error

    def discard(self) -> None:
        """Remove the files of a failed save."""
        if self._is_first:
            remove(self._temporary)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: any folder will do."""
        return True

    def _explain(self, error: OSError) -> CheckpointError:
        what = f"{self._folder.name} could not be written to {self._folder.parent} ({error.strerror})"
        kept = "earlier checkpoints are untouched"
        if error.errno in _FULL:
            return CheckpointError(f"{what}; {kept}: free space there, or lower checkpoint.keep, then resume")
        if isinstance(error, FileNotFoundError):
            return CheckpointError(
                f"{what}; {kept}: every rank must see the same folder: "
                "put run.dir on a file system that all hosts share"
            )
        return CheckpointError(f"{what}; {kept}: check that folder's disk and permissions, then resume")


def _write(file: BinaryIO, name: str, item: WriteItem, tensor: Tensor) -> WriteResult:
    assert item.tensor_data is not None
    data = _bytes_of(tensor)
    start = file.seek(0, os.SEEK_CUR)
    file.write(data)
    chunk = StoredShard(
        offsets=tuple(item.tensor_data.chunk.offsets),
        shape=tuple(item.tensor_data.chunk.sizes),
        file=name,
        start=start,
        num_bytes=data.nbytes,
        xxh3_128=hash_bytes(data),
    )
    return WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=chunk)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _stored(metadata: Any, chunks: list[StoredShard]) -> StoredTensor:
    assert isinstance(metadata, TensorStorageMetadata)
    chunks = sorted(chunks, key=lambda chunk: chunk.offsets)
    return StoredTensor(dtype=dtype_name(metadata.properties.dtype), shape=tuple(metadata.size), chunks=chunks)
