"""Weights of a Hugging Face folder under our names, checked against an architecture."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.hf.families import name_map, stored_shapes
from meshwright.checkpoint.hf.folder import CONFIG, HfFolder, read_json
from meshwright.checkpoint.hf.layouts import row_ranges, their_shape, to_ours
from meshwright.checkpoint.hf.llama import HEAD
from meshwright.checkpoint.hf.name_map import Drop, NameMap, Rename
from meshwright.errors import CheckpointError, ConfigError
from meshwright.log import logger
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_from_hf
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.units import first_of

_NUM_NAMED = 4
# Fields that do not change shapes, but change what the same tensors compute.
_UNSEEN_IN_SHAPES = ("norm_eps", "rope_theta", "rope_scaling", "yarn", "rope_interleaved", "experts_per_token")
_UNSEEN_OF_ROUTER = ("score", "normalize_weights", "weight_scale", "num_groups", "groups_per_token")


class HfWeights(Mapping[str, Tensor]):
    """Mapping from our names to tensors, each read from disk on every access; all keys of the folder accounted for."""

    def __init__(
        self, folder: HfFolder, theirs: dict[str, list[str]], table: NameMap, dtype: torch.dtype | None = None
    ) -> None:
        self.folder = folder
        self.table = table
        self._theirs, self._dtype = theirs, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __contains__(self, name: object) -> bool:
        return name in self._theirs

    def __len__(self) -> int:
        return len(self._theirs)

    @property
    def dropped(self) -> dict[str, list[str]]:
        """Return their names of the tensors that are ignored, by reason."""
        return self.table.dropped(self.folder.names)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one of our tensors."""
        return self._dtype or self.folder.dtype(self._theirs[name][0])

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return one of our tensors, or its `rows` (start, end) of dim 0 where the name map keeps rows."""
        parts, rename = self._theirs[name], self.table.rename_of(name)
        if rename.is_stacked:
            start, end = rows or (0, len(parts))
            tensor = to_ours(rename, [self.folder.read(part) for part in parts[start:end]])
        else:
            tensor = to_ours(rename, [self.folder.read(parts[0], rows if rename.keeps_rows else None)])
        return tensor.to(self.dtype(name))


def load_hf_parameters(
    hf_folder: Path | str,
    architecture: LlamaArchitecture,
    names: Collection[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> HfWeights:
    """Return the whole tensors of `hf_folder` by our names, all or only `names`, in `dtype` (None: as stored).

    All names and shapes are checked at once; each tensor is read on access, those in block-fp8 as bfloat16. Raises
    CheckpointError for unknown, missing or damaged tensors, ConfigError for those of another architecture,
    UnsupportedError for other quantised ones.
    """
    path = Path(hf_folder).expanduser()
    folder = HfFolder(path)
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
    shapes, table = stored_shapes(architecture), _name_map(architecture, config).spelled_as(folder.names)
    theirs = table.account(folder.names, shapes, str(path))
    folder.require_floats()
    _require_shapes(folder, theirs, {name: their_shape(table.rename_of(name), shapes[name]) for name in shapes})
    _require_one_dtype(folder, theirs)
    if architecture.tie_embeddings and HEAD in folder.names:
        _require_copy(folder, theirs["embedding.weight"][0])
    if config is not None:
        _remark_differences(path, config, architecture)
    return HfWeights(folder, {name: theirs[name] for name in (theirs if names is None else names)}, table, dtype)


def _name_map(architecture: LlamaArchitecture, config: dict[str, Any] | None) -> NameMap:
    """Return the name map of a folder with `config`; layers that predict further tokens are dropped by name."""
    model_type = None if config is None else str(config.get("model_type"))
    table = name_map(architecture, model_type)
    num_further = 0 if config is None else config.get("num_nextn_predict_layers") or 0
    if not num_further or config is None or config.get("num_hidden_layers") != architecture.num_layers:
        return table
    layers = range(architecture.num_layers, architecture.num_layers + num_further)
    reason = "of the layers that predict further tokens, which are not trained here"
    return replace(table, drops=(*table.drops, *(Drop(f"model.layers.{layer}.{{rest}}", reason) for layer in layers)))


def _require_one_dtype(folder: HfFolder, theirs: dict[str, list[str]]) -> None:
    for name, parts in theirs.items():
        if len(kinds := {folder.dtype(part) for part in parts}) > 1:
            raise CheckpointError(
                f"{folder.path}: the experts of {name}, from {parts[0]} on, have several dtypes "
                f"({', '.join(sorted(map(str, kinds)))}): convert them to one"
            )


def _require_shapes(folder: HfFolder, theirs: dict[str, list[str]], shapes: dict[str, tuple[int, ...]]) -> None:
    wrong = [
        f"{part} is {list(folder.shape(part))}, the architecture has {list(shape)}"
        for name, shape in shapes.items()
        for part in theirs[name]
        if folder.shape(part) != shape
    ]
    if wrong:
        raise ConfigError(
            f"the weights of {folder.path} have other sizes: {first_of(wrong, _NUM_NAMED, '; ')}: "
            "make the architecture (config.json, or [model] of the job) match the weights"
        )


def _require_copy(folder: HfFolder, embedding: str) -> None:
    shape = folder.shape(embedding)
    ranges = row_ranges(Rename(embedding, HEAD), shape, folder.dtype(embedding).itemsize)
    if folder.shape(HEAD) != shape or not all(
        torch.equal(folder.read(HEAD, rows), folder.read(embedding, rows)) for rows in ranges
    ):
        raise CheckpointError(
            f"{folder.path}: {HEAD} differs from {embedding}, but the architecture ties the two: "
            "set tie_word_embeddings to false in config.json (or model.options.tie_embeddings = false in the job)"
        )


def _remark_differences(path: Path, config: dict[str, Any], architecture: LlamaArchitecture) -> None:
    """Warn about fields in which the architecture differs from the config of these weights."""
    trained_as = architecture_from_hf(config, str(path / CONFIG))
    theirs, ours = _unseen(trained_as), _unseen(architecture)
    for field in sorted(theirs.keys() & ours.keys()):
        if theirs[field] != ours[field]:
            given = (path, field, theirs[field], ours[field])
            logger.warning("%s: the weights were trained with %s = %s, the model has %s", *given)


def _unseen(architecture: LlamaArchitecture) -> dict[str, Any]:
    fields = {name: getattr(architecture, name) for name in _UNSEEN_IN_SHAPES if hasattr(architecture, name)}
    if isinstance(architecture, MoEArchitecture):
        fields |= {f"router.{name}": getattr(architecture.router, name) for name in _UNSEEN_OF_ROUTER}
    return fields
