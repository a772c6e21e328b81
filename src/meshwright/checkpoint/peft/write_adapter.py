"""write_adapter: the adapter of a checkpoint as a folder that PEFT reads."""

import json
import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from meshwright.checkpoint.format.find_checkpoint import ADAPTER_CONFIG
from meshwright.checkpoint.hf.hf_model import HfModel
from meshwright.checkpoint.hf.output_folder import NewFolder, Replaceable
from meshwright.checkpoint.peft.peft_config import ADAPTER_WEIGHTS, peft_config
from meshwright.checkpoint.peft.peft_names import keys_of, layers_of, their_module, their_modules
from meshwright.checkpoint.safetensors.rounding import rounded
from meshwright.checkpoint.safetensors.safetensors_file import create, safetensors_header, write_at
from meshwright.checkpoint.saved_model import SavedModel
from meshwright.checkpoint.saving import bytes_of
from meshwright.checkpoint.section import SectionReader
from meshwright.spec.model.hf.name_map import NameMap
from meshwright.spec.step.adapter import ADAPTER_PARTS

PEFT_FOLDER = Replaceable(
    lambda folder: (folder / ADAPTER_CONFIG).is_file(), re.compile(f"{ADAPTER_CONFIG}|{ADAPTER_WEIGHTS}")
)


class SavedAdapter:
    """The adapter in a checkpoint, with its names in PEFT's files."""

    def __init__(self, model: SavedModel, described: HfModel) -> None:
        """Raise UnsupportedError for an adapter of layers that PEFT has no names for."""
        self._model, self._table = model, described.name_map()
        self._saved = SectionReader(model.checkpoint, "model")
        self.shapes = {k: v for k, v in self._saved.shapes.items() if k.rpartition(".")[2] in ADAPTER_PARTS}
        self._keys = keys_of(self.shapes, self._table)
        self.dtypes = {name: self._saved.dtypes[name] for name in self.shapes}
        self.num_parameters = sum(prod(shape) for shape in self.shapes.values())

    def write(self, folder: NewFolder, dtype: torch.dtype) -> int:
        """Write both files on rank 0, and return the bytes of the tensors."""
        num_bytes = self.num_parameters * dtype.itemsize

        def act() -> None:
            self._write_weights(folder.path / ADAPTER_WEIGHTS, dtype, num_bytes)
            config = self._config(self._saved.shapes)
            (folder.path / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

        folder.write(act, on_rank=0)
        return num_bytes

    def _write_weights(self, path: Path, dtype: torch.dtype, num_bytes: int) -> None:
        header = safetensors_header({self._keys[name]: (dtype, shape) for name, shape in self.shapes.items()})
        create(path, header, num_bytes)
        start = len(header)
        with path.open("r+b", buffering=0) as file:
            for name in self.shapes:
                data = rounded(self._saved.read(name), dtype, name)
                write_at(file.fileno(), bytes_of(data), start)
                start += data.nbytes
            os.fsync(file.fileno())

    def _config(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
        layers = layers_of(self.shapes)
        modules = their_modules(layers, self._table)
        # What is not adapted and has a matrix must not be named, too.
        others = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
        found = [_module_name(name, self._table) for name in others if name not in modules]
        base = self._model.job.model.initial_weights
        return peft_config(self._model.job.adapter, [*modules.values()], [name for name in found if name], base)


def _module_name(layer: str, table: NameMap) -> str | None:
    module = their_module(layer, table)
    return None if module is None else module.name
