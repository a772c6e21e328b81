"""checkpoint.json: the file, byte range and hash of each shard of each tensor.

    step-20/
      checkpoint.json     {"checksum": hash of the rest, "contents": {...}}: written last
      rank-00000.bin      raw little-endian tensor data, one chunk after the other
      rank-00001.bin

JSON and raw bytes only, no pickle, so that a damaged or foreign checkpoint cannot run code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import torch
import xxhash
from pydantic import ValidationError

from meshwright.checkpoint.find_checkpoint import FILE_NAME
from meshwright.errors import CheckpointError
from meshwright.spec.frozen import Frozen

FORMAT_VERSION: Final = 1


class StoredShard(Frozen):
    """A rank's shard of one tensor, and its bytes on disk."""

    offsets: tuple[int, ...]
    """Index of the shard's first element in the whole tensor, by dim."""
    shape: tuple[int, ...]
    """Elements of the shard, by dim."""
    file: str
    """Name of the file next to checkpoint.json."""
    start: int
    """First byte in the file."""
    num_bytes: int
    """Bytes in the file."""
    xxh3_128: str
    """Hash of these bytes, in hexadecimal."""


class StoredTensor(Frozen):
    """One tensor, covered by its shards."""

    dtype: str
    """Name of the torch dtype, such as float32."""
    shape: tuple[int, ...]
    """Elements of the whole tensor, by dim."""
    chunks: list[StoredShard]
    """Its shards, without empty ones."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the torch dtype; raises CheckpointError for an unknown one."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"a tensor has dtype {self.dtype}, which torch {torch.__version__} does not have: "
                "load it with the torch version that saved it (versions are in the run's manifest.json)"
            )
        return dtype


class Contents(Frozen):
    """Contents of one checkpoint."""

    format_version: Literal[1] = FORMAT_VERSION
    """Version of this format."""
    save_id: str
    """Random id of this save."""
    metadata: dict[str, Any]
    """Metadata given to save: step, layout, data position, ..."""
    file_bytes: dict[str, int]
    """Size of every data file."""
    tensors: dict[str, StoredTensor]
    """By name: section/fqn, such as model/norm.weight or optimizer/norm.weight/exp_avg."""

    def section(self, name: str) -> dict[str, StoredTensor]:
        """Return the tensors under one top-level key of the saved state, by their full names."""
        return {full: tensor for full, tensor in self.tensors.items() if full.startswith(f"{name}/")}


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the xxh3_128 of `data` in hexadecimal; 5 GB/s on one core."""
    return xxhash.xxh3_128_hexdigest(data)


def contents_to_text(contents: Contents) -> str:
    """Return the text of checkpoint.json."""
    body = contents.to_dict()
    return json.dumps({"checksum": _checksum(body), "contents": body})


def read_contents(folder: Path) -> Contents:
    """Return the contents of the checkpoint in `folder`; raises CheckpointError if missing, damaged or too new."""
    body = _read_body(folder)
    version = body.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {version}, but this version of meshwright reads {FORMAT_VERSION}: "
            "load it with the meshwright that saved it (see versions in the run's manifest.json)"
        )
    try:
        return Contents.from_json(json.dumps(body))
    except ValidationError as error:
        raise CheckpointError(f"{folder / FILE_NAME} is damaged ({error}): {remedy(folder)}") from error


def _read_body(folder: Path) -> dict[str, Any]:
    path = folder / FILE_NAME
    try:
        document = json.loads(path.read_bytes())
        body, checksum = document["contents"], document["checksum"]
    except FileNotFoundError:
        what = f"has no {FILE_NAME}, so it is no complete checkpoint" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{folder} {what}: {remedy(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}): {remedy(folder)}") from error
    if not isinstance(body, dict) or _checksum(body) != checksum:
        raise CheckpointError(f"{path} is damaged (its checksum does not match): {remedy(folder)}")
    return body


def remedy(folder: Path) -> str:
    """Return the fix for a damaged checkpoint: the next older one, if any."""
    steps = {int(name): folder.parent / f"step-{name}" for name in _step_numbers(folder.parent)}
    own = folder.name.removeprefix("step-")
    older = [step for step in steps if own.isdigit() and step < int(own) and (steps[step] / FILE_NAME).is_file()]
    if older:
        return f"delete this folder to go on from {steps[max(older)].name}, the newest older checkpoint"
    return "there is no older checkpoint next to it: restore this folder from a copy, or delete it and start again"


def _step_numbers(folder: Path) -> list[str]:
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return [name for name in names if name.isdigit()]


def _checksum(body: Any) -> str:
    return hash_bytes(json.dumps(body, sort_keys=True).encode())
