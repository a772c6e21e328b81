"""HfFolder: the tensors of a Hugging Face folder, in one or several safetensors files, each key accounted for."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.hf.quantized_weights import (
    BlockScales,
    PackedNames,
    block_of,
    find_packed,
    find_scales,
    unpack,
)
from meshwright.checkpoint.safetensors.safetensors_file import DTYPES, SafetensorsFile
from meshwright.checkpoint.safetensors.safetensors_header import StoredEntry
from meshwright.checkpoint.safetensors.weight_index import CONFIG, read_json, stored_files
from meshwright.errors import UnsupportedError

_READABLE = ("F64", "F32", "BF16", "F16")
_OTHER_WEIGHTS = (
    *("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "adapter_config.json", "consolidated*.pth"),
    *("*.gguf", "tf_model.h5", "flax_model.msgpack"),
)


class HfFolder:
    """A folder with checked files and headers; tensors are read on request, block-fp8 and MXFP4 ones dequantised.

    Raises CheckpointError for missing, truncated or stray files and for keys that the index and the files do not both
    have exactly once, ConfigError for a folder without weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.others: list[str] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        for name, entries in stored_files(path).items():
            self._file_of |= dict.fromkeys(entries, SafetensorsFile(path / name, entries))

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
