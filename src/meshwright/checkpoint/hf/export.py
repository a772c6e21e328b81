"""Export of a checkpoint as a Hugging Face folder, with one output file in memory at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from meshwright.checkpoint.checkpoint import load_parameters
from meshwright.checkpoint.durable import commit, temporary_sibling, write_durably
from meshwright.checkpoint.hf.families import BUFFER, name_map, num_parameters, stored_shapes
from meshwright.checkpoint.hf.folder import INDEX, SINGLE
from meshwright.checkpoint.hf.name_map import to_theirs, written_together
from meshwright.checkpoint.hf.side_files import write_side_files
from meshwright.checkpoint.saved_model import SavedModel, find_saved_model
from meshwright.errors import CheckpointError, ConfigError
from meshwright.spec.model.architecture import LlamaArchitecture

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
) -> Exported:
    """Write the model in `source`, a run or a checkpoint folder, as the new Hugging Face folder `out`.

    Weights are rounded to `dtype`. No file holds more than `max_shard_bytes` of tensors, unless one tensor, or all
    experts of a layer, are larger. `out` is created atomically. Raises ConfigError if it exists, CheckpointError for
    a damaged source, UnsupportedError for a model that transformers lacks.
    """
    if out.exists():
        raise ConfigError(f"{out} exists, and export never overwrites: name a new folder, or move it away")
    model = find_saved_model(source, step)
    temporary = temporary_sibling(out)
    try:
        temporary.mkdir(parents=True)
        write_side_files(model, temporary, dtype)
        shards = _shards(model.architecture, _DTYPES[dtype].itemsize, max_shard_bytes)
        num_bytes = _write_weights(model, shards, _DTYPES[dtype], temporary)
        commit(temporary, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{out} could not be written ({reason}), and was removed: free space there, or name a folder that you may "
            "write"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(model, num_parameters(model.architecture), len(shards), num_bytes)


def _shards(architecture: LlamaArchitecture, itemsize: int, max_bytes: int) -> list[list[str]]:
    """Return our names of each file's tensors, in the model's order; parts of one of their tensors share a file."""
    shapes = stored_shapes(architecture)
    shards: list[list[str]] = [[]]
    room = max_bytes
    for names in written_together(name_map(architecture), shapes):
        size = sum(math.prod(shapes[name]) for name in names) * itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_bytes
        shards[-1] += names
        room -= size
    return shards


def _write_weights(model: SavedModel, shards: list[list[str]], dtype: torch.dtype, folder: Path) -> int:
    """Write the weight files, with an index if there are several, and return the bytes of all tensors."""
    names = name_map(model.architecture)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # A router's bias stays float32, as in transformers.
        rounded = {
            name: tensor.to(torch.float32 if name.startswith(BUFFER) else dtype)
            for name, tensor in load_parameters(model.checkpoint, shard).items()
        }
        tensors = to_theirs(names, rounded)
        # transformers requires this entry.
        save_file(tensors, folder / file, metadata={"format": "pt"})
        _make_readable(folder / file)
        _fsync(folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        write_durably(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return num_bytes


def _make_readable(path: Path) -> None:
    # safetensors 0.8 writes files readable by their owner only; follow the umask instead.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
