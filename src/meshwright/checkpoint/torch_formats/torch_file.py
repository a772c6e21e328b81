"""TorchFile: the tensors of a torch.save file, read by torch's own weights_only unpickler."""

import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import CheckpointError

_GLOBAL = re.compile(r"GLOBAL ([A-Za-z_][\w.]*\.[\w.]*\w)")


class TorchFile:
    """A file with a (nested) dict of tensors, mapped into memory; names of nested ones are joined by dots."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = load_tensors(path, path, is_mapped=zipfile.is_zipfile(path))
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dict of tensors: save a state_dict")
        self._tensors: dict[str, Tensor] = {}
        self.others: list[str] = []
        self._add(content, "")

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one tensor, or its `rows` (start, end) of dim 0."""
        tensor = self._tensors[name]
        return tensor if rows is None or not tensor.shape else tensor[rows[0] : rows[1]]

    def _add(self, content: Mapping[Any, Any], prefix: str) -> None:
        for key, value in content.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                self._add(value, f"{name}.")
            elif name in self._tensors:
                raise CheckpointError(f"{self.path} holds {name} twice: save a state_dict without nesting")
            elif isinstance(value, Tensor):
                self._tensors[name] = value.detach()
            else:
                self.others.append(name)


def load_tensors(source: Path | io.BytesIO, path: Path, *, is_mapped: bool = False) -> Any:
    """Return what torch.load reads with weights_only; raises CheckpointError, which names `path`, for anything else."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    # A damaged pickle or archive raises almost any of the built-in exceptions.
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read with weights_only ({_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the end of a message; torch's own advice, to run the code in the file, is unsafe."""
    text = str(error)
    if (named := _GLOBAL.search(text)) is not None:
        return f"it names {named[1]}, which no dict of tensors contains): save a state_dict, which holds tensors only"
    if text.startswith("Weights only load failed"):
        return "it is damaged or holds more than tensors): copy it again, or save a plain dict of tensors"
    if isinstance(error, EOFError) and not text:
        text = "it ends too early"
    reason = text.partition("\n")[0].partition(". ")[0]
    if " " not in reason:
        # An opcode or a key that the unpickler does not know.
        reason = "it is no file that torch.save wrote, or is damaged"
    return f"{reason}): copy it again, or save a plain dict of tensors"
