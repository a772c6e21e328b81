"""DcpFolder: the tensors of a torch.distributed.checkpoint folder, each shard read on request."""

import io
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.format.boxes import Box, intersection
from meshwright.checkpoint.torch_formats.checksums import verify_checksums
from meshwright.checkpoint.torch_formats.dcp_metadata import DcpShard, DcpTensor, read_dcp_metadata
from meshwright.checkpoint.torch_formats.torch_file import load_tensors
from meshwright.errors import CheckpointError


class DcpFolder:
    """A folder whose index was checked; a shard of a tensor is read as torch.save wrote it, by weights_only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors, self.others = read_dcp_metadata(path)
        # Shards of the tensor that was read last: torch.load reads whole ones, and an import asks for a few rows.
        self._loaded: tuple[str, dict[Box, Tensor]] = ("", {})

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor, or its `rows` (start, end) of dim 0."""
        tensor = self._tensors[name]
        box = Box((0,) * len(tensor.shape), tensor.shape)
        if rows is not None and tensor.shape:
            box = Box((rows[0], *box.offsets[1:]), (rows[1] - rows[0], *box.shape[1:]))
        if self._loaded[0] != name:
            self._loaded = (name, {})
        loaded = self._loaded[1]
        whole = torch.empty(box.shape, dtype=tensor.dtype)
        for shard in tensor.shards:
            if (common := intersection(shard.box, box)) is not None:
                if shard.box not in loaded:
                    loaded[shard.box] = self._load(name, tensor, shard)
                whole[common.within(box)] = loaded[shard.box][common.within(shard.box)]
        return whole

    def _load(self, name: str, tensor: DcpTensor, shard: DcpShard) -> Tensor:
        path = self.path / shard.file
        try:
            with path.open("rb") as file:
                file.seek(shard.start)
                data = file.read(shard.num_bytes)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): copy the whole folder again") from error
        verify_checksums(io.BytesIO(data), path)
        loaded = load_tensors(io.BytesIO(data), path)
        if not isinstance(loaded, Tensor) or (loaded.dtype, tuple(loaded.shape)) != (tensor.dtype, shard.box.shape):
            raise CheckpointError(
                f"{path}: bytes {shard.start} to {shard.start + shard.num_bytes} are not the shard of {name} that the "
                "index describes: copy the whole folder again"
            )
        return loaded
