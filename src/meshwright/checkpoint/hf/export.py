"""Export of a checkpoint as a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from meshwright.checkpoint.find_checkpoint import is_hugging_face
from meshwright.checkpoint.hf.families import BUFFER, name_map, num_parameters, stored_shapes
from meshwright.checkpoint.hf.output_files import divide, output_tensors, write_files
from meshwright.checkpoint.hf.output_folder import output_folder, require_target
from meshwright.checkpoint.hf.side_files import write_side_files
from meshwright.checkpoint.saved_model import SavedModel, find_saved_model
from meshwright.checkpoint.saved_tensors import SavedTensors
from meshwright.errors import ConfigError
from meshwright.spec.model.hf.hf_config import architecture_to_hf

ExportDType = Literal["float32", "bfloat16"]
_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    model: SavedModel
    num_parameters: int
    num_files: int
    num_bytes: int


def export(
    source: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: ExportDType = "float32",
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> Exported:
    """Write the model in `source`, a run or a checkpoint folder, as the new Hugging Face folder `out`.

    Weights are rounded to `dtype`. No file holds more than `max_shard_bytes` of tensors, unless one tensor is larger.
    Memory is that of the largest fused tensor, or of some 64 MiB. `out` is created atomically; with `overwrite` it may
    replace a Hugging Face folder. Raises ConfigError if it exists, CheckpointError for a damaged source or a full disk,
    UnsupportedError for a model that transformers lacks.
    """
    require_target(out, "export", is_hugging_face if overwrite else None)
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes = {max_shard_bytes}: must be 1 or more")
    model = find_saved_model(source, step)
    # Raises for a model that transformers lacks.
    architecture_to_hf(model.architecture)
    saved = SavedTensors(model.checkpoint, "model")
    shapes = stored_shapes(model.architecture)
    saved.require(shapes)
    # A router's bias stays float32, as in transformers.
    dtypes = {name: torch.float32 if name.startswith(BUFFER) else _DTYPES[dtype] for name in shapes}
    outputs = output_tensors(name_map(model.architecture), shapes, dtypes)
    files = divide(outputs, max_shard_bytes)
    with output_folder(out, sum(output.num_bytes for output in outputs)) as folder:
        write_side_files(model, folder, dtype)
        num_bytes = write_files(files, saved, folder)
    return Exported(model, num_parameters(model.architecture), len(files), num_bytes)
