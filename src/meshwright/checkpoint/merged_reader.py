"""MergedReader: the tensors of a checkpoint as those of a plain model, an adapter's updates added to the weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.peft.peft_names import layers_of
from meshwright.checkpoint.saved_model import SavedModel
from meshwright.checkpoint.section import SectionReader
from meshwright.models.adapted_linear import merged_weight
from meshwright.models.packed_weight import unpack
from meshwright.spec.step.adapter import ADAPTER_PARTS, LORA_A, PACKED_BLOCK, PACKED_SCALE, Adapter

_WEIGHT = "weight"


class MergedReader(SectionReader):
    """As SectionReader, without the adapter's tensors; a weight that is adapted is read as what its layer computes."""

    def __init__(self, folder: Path, adapter: Adapter) -> None:
        super().__init__(folder, "model")
        self._adapter, everything = adapter, super().shapes
        self._adapted = {f"{layer}.{_WEIGHT}" for layer in layers_of(everything)}
        self._packed = {name for name in self._adapted if _scale_of(name) in everything}
        self._hidden = {name for name in everything if name.rpartition(".")[2] in (*ADAPTER_PARTS, PACKED_SCALE)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the plain model by name."""
        stored = super().shapes
        whole = {name: (stored[name][0], stored[_scale_of(name)][1] * PACKED_BLOCK) for name in self._packed}
        return {name: whole.get(name, shape) for name, shape in stored.items() if name not in self._hidden}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which every tensor of the plain model is read, by name."""
        stored = {name: dtype for name, dtype in super().dtypes.items() if name not in self._hidden}
        return stored | {name: torch.float32 for name in self._adapted if stored[name] != torch.float64}

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor on the CPU, or its `rows` (start, end) of dim 0; adapted weights in float32 at least."""
        own = super().read(name, rows)
        if name not in self._adapted:
            return own
        if name in self._packed:
            own = unpack(own, super().read(_scale_of(name), rows), torch.float32)
        parts = {}
        for part in self._adapter.parts:
            # Rows of the weight are rows of B and elements of the magnitude.
            of_part = None if part == LORA_A else rows
            parts[part] = super().read(name.removesuffix(_WEIGHT) + part, of_part)
        return merged_weight(own, self._adapter, parts)


def _scale_of(weight: str) -> str:
    return weight.removesuffix(_WEIGHT) + PACKED_SCALE


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
