"""HfFolder: the tensors of a Hugging Face folder, in one or several safetensors files, each key accounted for."""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.hf.block_fp8 import BlockScales, block_of, find_scales
from meshwright.checkpoint.hf.mxfp4 import PackedNames, find_packed, unpack
from meshwright.checkpoint.hf.safetensors_file import DTYPES, SafetensorsFile, StoredEntry, unique_keys
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.units import first_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_READABLE = ("F64", "F32", "BF16", "F16")
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
WEIGHT_FILES = "|".join((re.escape(INDEX), re.escape(SINGLE), _SHARD.pattern))
"""Regular expression of the names of all files with weights and of their index."""
_OTHER_WEIGHTS = (
    *("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "adapter_config.json", "consolidated*.pth"),
    *("*.gguf", "tf_model.h5", "flax_model.msgpack"),
)
_AGAIN = "copy the whole folder again"


class HfFolder:
    """A folder with checked files and headers; tensors are read on request, block-fp8 and MXFP4 ones dequantised.

    Raises CheckpointError for missing, truncated or stray files and for keys that the index and the files do not both
    have exactly once, ConfigError for a folder without weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.others: list[str] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        for name, keys in self._expected_keys().items():
            file = SafetensorsFile(path / name)
            if keys is not None:
                self._require_keys(file, keys)
            self._file_of |= dict.fromkeys(file.entries, file)

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors; a quantised one has one name, without its scales."""
        parts = {part for packed in self._packed.values() for part in (packed.blocks, packed.scales)}
        return (set(self._file_of) | set(self._packed)) - set(self._scales.values()) - parts

    @property
    def unread_weights(self) -> list[str]:
        """Return the names of other files with weights, such as an adapter's or pickles of the same model."""
        read = {file.path.name for file in self._file_of.values()}
        found = {path.name for pattern in _OTHER_WEIGHTS for path in self.path.glob(pattern)}
        return sorted(found - read)

    @property
    def is_quantised(self) -> bool:
        """Return whether some tensors are stored in block-fp8 or MXFP4."""
        return bool(self._scales or self._packed)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in the file's header, or that of the unpacked tensor."""
        return self._packed[name].shape if name in self._packed else self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` returns."""
        is_quantised = name in self._scales or name in self._packed
        return torch.bfloat16 if is_quantised else DTYPES[self._entry(name).dtype]

    def require_floats(self) -> None:
        """Raise UnsupportedError for a tensor in an integer format or one that is not dequantised here."""
        for name in sorted(self.names - self._packed.keys()):
            stored_as = self._entry(name).dtype
            if stored_as not in _READABLE and name not in self._scales:
                raise UnsupportedError(
                    f"{self._file_of[name].path} holds {name} as {stored_as}, but only {', '.join(_READABLE)} and "
                    "F8_E4M3 with block scales (quant_method fp8) and U8 with scales (mxfp4) can be read: "
                    "take a folder that is not quantised"
                )

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor, or its `rows` (start, end) of dim 0; dequantised in float32 and rounded to bfloat16."""
        if name in self._packed:
            parts = self._packed[name][:2]
            return unpack(*(self._file_of[part].read(part, rows) for part in parts))
        stored = self._file_of[name].read(name, rows)
        if name not in self._scales:
            return stored
        scales = self._file_of[self._scales[name]].read(self._scales[name])
        block = block_of(self._config, str(self.path / CONFIG))
        return BlockScales(scales, block).apply(stored, 0 if rows is None else rows[0]).to(torch.bfloat16)

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_json(self.path / CONFIG) if (self.path / CONFIG).is_file() else {}

    @cached_property
    def _scales(self) -> dict[str, str]:
        return find_scales(self._entries, self._config, self.path)

    @cached_property
    def _packed(self) -> dict[str, PackedNames]:
        return find_packed(self._entries, self.path)

    @property
    def _entries(self) -> dict[str, StoredEntry]:
        return {name: self._entry(name) for name in self._file_of}

    def _entry(self, name: str) -> StoredEntry:
        return self._file_of[name].entries[name]

    def _require_keys(self, file: SafetensorsFile, keys: set[str]) -> None:
        """Raise CheckpointError unless `file` holds exactly the keys that the index assigns to it."""
        present = set(file.entries)
        if lost := sorted(keys - present):
            raise CheckpointError(f"{file.path} lacks {first_of(lost)}, which {INDEX} assigns to it: {_AGAIN}")
        if extra := sorted(present - keys):
            raise CheckpointError(
                f"{file.path} holds {first_of(extra)}, which {INDEX} assigns to another file or to none: {_AGAIN}"
            )

    def _expected_keys(self) -> dict[str, set[str] | None]:
        """Return the files, each with the keys that the index assigns to it; None without an index."""
        has_index, has_single = ((self.path / name).is_file() for name in (INDEX, SINGLE))
        shards = {path.name for path in self.path.glob("*.safetensors") if _SHARD.fullmatch(path.name)}
        if has_single and (has_index or shards):
            other = INDEX if has_index else sorted(shards)[0]
            raise ConfigError(
                f"{self.path} holds both {SINGLE} and {other}, which may be different models: remove one of them"
            )
        if has_single:
            return {SINGLE: None}
        if not has_index:
            raise ConfigError(_no_weights(self.path, sorted(shards)))
        by_file = self._index()
        if stray := sorted(shards - by_file.keys()):
            raise CheckpointError(f"{self.path} holds {first_of(stray)}, which {INDEX} does not name: {_AGAIN}")
        return dict(by_file)

    def _index(self) -> dict[str, set[str]]:
        """Return the keys of each file by the index; raises CheckpointError for an invalid index or a missing file."""
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / INDEX} has no weight_map: {_AGAIN}")
        by_file: dict[str, set[str]] = {}
        for key, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{self.path / INDEX} assigns {key} to {name!r}, which is no file name: {_AGAIN}")
            by_file.setdefault(name, set()).add(key)
        for name, keys in sorted(by_file.items()):
            if not (self.path / name).is_file():
                raise CheckpointError(
                    f"{self.path} lacks {name}, which holds {len(keys)} of its {len(weight_map)} tensors: {_AGAIN}"
                )
        return dict(sorted(by_file.items()))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ConfigError if missing, CheckpointError if damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: name the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object: copy it again")
    return value


def _no_weights(path: Path, shards: list[str]) -> str:
    """Return what is wrong with a folder that has neither an index nor a single file."""
    what = f"{path} holds neither {SINGLE} nor {INDEX}"
    if shards:
        return f"{what}, but {first_of(shards)}: copy {INDEX}, which names all of the files, too"
    others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in path.glob(pattern))
    hint = f" ({others[0]} is a pickle, which is not read: convert it to safetensors)" if others else ""
    return f"{what}{hint}: name the folder of a Hugging Face model"
