"""Tensors of a Hugging Face folder, in one or several safetensors files, read one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import CheckpointError, ConfigError, UnsupportedError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_READABLE = ("F64", "F32", "BF16", "F16")


class HfFolder:
    """A folder with checked files and headers; tensors are read on request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for name, keys in self._expected_keys().items():
            self._files[name] = self._open(name)
            present = set(self._files[name].keys())
            lost = sorted((keys or set()) - present)
            if lost:
                raise CheckpointError(
                    f"{path / name} lacks {lost[0]}, which {INDEX} assigns to it: copy the whole folder again"
                )
            for key in present if keys is None else keys:
                self._file_of[key] = name

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in the file's header."""
        return tuple(self._slice(name).get_shape())

    def require_floats(self) -> None:
        """Raise UnsupportedError for a tensor in a quantised or integer format."""
        for name in sorted(self.names):
            stored_as = self._slice(name).get_dtype()
            if stored_as not in _READABLE:
                raise UnsupportedError(
                    f"{self.path / self._file_of[name]} holds {name} as {stored_as}, but only "
                    f"{', '.join(_READABLE)} can be read: take a folder that is not quantised"
                )

    def read(self, name: str) -> Tensor:
        """Return one tensor as stored, memory-mapped from the file."""
        try:
            tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / self._file_of[name]} is damaged ({error}): copy it again") from error
        return tensor

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _expected_keys(self) -> dict[str, set[str] | None]:
        """Return the files, each with the keys that the index assigns to it; None without an index."""
        if not (self.path / INDEX).is_file():
            if (self.path / SINGLE).is_file():
                return {SINGLE: None}
            others = sorted(path.name for path in self.path.glob("*.bin"))
            hint = f" ({others[0]} is a pickle, which is not read: convert it to safetensors)" if others else ""
            raise ConfigError(
                f"{self.path} holds neither {SINGLE} nor {INDEX}{hint}: name the folder of a Hugging Face model"
            )
        index = read_json(self.path / INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / INDEX} has no weight_map: copy the whole folder again")
        by_file: dict[str, set[str] | None] = {}
        for name in sorted(set(weight_map.values())):
            if not (self.path / name).is_file():
                count = sum(1 for file in weight_map.values() if file == name)
                raise CheckpointError(
                    f"{self.path} lacks {name}, which holds {count} of its {len(weight_map)} tensors: "
                    "copy the whole folder again"
                )
            by_file[name] = {key for key, file in weight_map.items() if file == name}
        return by_file

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self.path / name, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path / name} cannot be read as safetensors ({error}): copy it again"
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ConfigError if missing, CheckpointError if damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: name the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object: copy it again")
    return value
