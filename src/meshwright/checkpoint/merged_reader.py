"""MergedReader: the tensors of a checkpoint as those of a plain model, an adapter's updates added to the weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.saved_model import SavedModel
from meshwright.checkpoint.section import SectionReader
from meshwright.models.adapted_linear import merged_weight
from meshwright.spec.step.adapter import ADAPTER_PARTS, LORA_A, Adapter

_WEIGHT = "weight"


class MergedReader(SectionReader):
    """As SectionReader, without the adapter's tensors; a weight that is adapted is read as what its layer computes."""

    def __init__(self, folder: Path, adapter: Adapter) -> None:
        super().__init__(folder, "model")
        self._adapter, everything = adapter, super().shapes
        self._of_adapter = {name for name in everything if name.rpartition(".")[2] in ADAPTER_PARTS}
        self._adapted = {name.removesuffix(LORA_A) + _WEIGHT for name in self._of_adapter if name.endswith(LORA_A)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the plain model by name."""
        return {name: shape for name, shape in super().shapes.items() if name not in self._of_adapter}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of every tensor of the plain model by name."""
        return {name: dtype for name, dtype in super().dtypes.items() if name not in self._of_adapter}

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor on the CPU, or its `rows` (start, end) of dim 0, in the dtype that it was saved in."""
        own = super().read(name, rows)
        if name not in self._adapted:
            return own
        parts = {}
        for part in self._adapter.parts:
            # Rows of the weight are rows of B and elements of the magnitude.
            of_part = None if part == LORA_A else rows
            parts[part] = super().read(name.removesuffix(_WEIGHT) + part, of_part)
        return merged_weight(own, self._adapter, parts)


def plain_reader(model: SavedModel) -> SectionReader:
    """Return the tensors of the plain model that a checkpoint computes, whether a run trained it or an adapter."""
    adapter = model.job.adapter
    return MergedReader(model.checkpoint, adapter) if adapter.freezes_base else SectionReader(model.checkpoint, "model")


def load_plain_parameters(model: SavedModel) -> Mapping[str, Tensor]:
    """Return the whole tensors of the plain model that a checkpoint computes, on the CPU by name."""
    if not model.job.adapter.freezes_base:
        return load_parameters(model.checkpoint)
    reader = plain_reader(model)
    return {name: reader.read(name) for name in reader.shapes}
