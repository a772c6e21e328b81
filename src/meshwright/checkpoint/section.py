"""SectionReader: the tensors of one section of a checkpoint, read by rows in one process."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.checkpoint import saved_tensors
from meshwright.checkpoint.format.boxes import Box, intersection
from meshwright.checkpoint.format.dtypes import torch_dtype
from meshwright.checkpoint.format.manifest import read_index, remedy, size_problem
from meshwright.checkpoint.format.saved import uncovered
from meshwright.checkpoint.loading import fill
from meshwright.checkpoint.shards import Shard
from meshwright.errors import CheckpointError, DamagedCheckpoint
from meshwright.units import first_of


class SectionReader:
    """Tensors whose saved shards cover them exactly once; only what `read` needs is read, and verified by its hash."""

    def __init__(self, folder: Path, section: str) -> None:
        """Read the index and all manifests; raises CheckpointError for a damaged or incomplete checkpoint."""
        self._folder = folder
        index = read_index(folder)
        if problems := [text for rank in range(len(index.ranks)) if (text := size_problem(folder, index, rank))]:
            raise DamagedCheckpoint("\n".join(problems))
        saved = saved_tensors(folder, [section])
        if lines := uncovered(part for parts in saved.values() for part in parts):
            raise DamagedCheckpoint(f"{folder} is incomplete: {first_of(lines)}: {remedy(folder)}")
        self._saved = {name.removeprefix(f"{section}/"): parts for name, parts in saved.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by name."""
        return {name: parts[0].shape for name, parts in self._saved.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of every tensor by name."""
        return {name: torch_dtype(parts[0].dtype) for name, parts in self._saved.items()}

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless the tensors have exactly these names and shapes."""
        own = self.shapes
        problems = {
            "lacks": sorted(shapes.keys() - own.keys()),
            "holds unknown": sorted(own.keys() - shapes.keys()),
            "has other sizes of": sorted(name for name in shapes.keys() & own.keys() if shapes[name] != own[name]),
        }
        if found := [f"{what} {first_of(names)}" for what, names in problems.items() if names]:
            raise CheckpointError(
                f"{self._folder} {'; '.join(found)}: its tensors are not those of the run's [model]; "
                "set that to what it was when the checkpoint was saved"
            )

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor on the CPU as saved, or its `rows` (start, end) of dim 0."""
        parts = self._saved[name]
        _, dtype, shape, *_ = parts[0]
        box = Box((0,) * len(shape), shape)
        if rows is not None and shape:
            box = Box((rows[0], *box.offsets[1:]), (rows[1] - rows[0], *shape[1:]))
        data = torch.empty(box.shape, dtype=torch_dtype(dtype))
        needed = [part for part in parts if part.shard is not None and intersection(part.shard.box, box) is not None]
        fill(self._folder, [Shard(name, dtype, shape, box, data)], [needed])
        return data
