"""Weights of a Hugging Face folder under our names, checked against an architecture."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.hf.families import name_map, stored_shapes
from meshwright.checkpoint.hf.folder import HfFolder, read_json
from meshwright.checkpoint.hf.llama import HEAD
from meshwright.checkpoint.hf.name_map import NameMap, their_shape, to_ours
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
    """Mapping from our names to tensors, each read from disk on every access."""

    def __init__(self, folder: HfFolder, theirs: dict[str, list[str]], names: NameMap, dtype: torch.dtype | None):
        self._folder, self._theirs, self._names, self._dtype = folder, theirs, names, dtype

    def __getitem__(self, name: str) -> Tensor:
        parts = [self._folder.read(part) for part in self._theirs[name]]
        tensor = to_ours(self._names.rename_of(name), parts)
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)


def load_hf_parameters(
    hf_folder: Path | str,
    architecture: LlamaArchitecture,
    names: Collection[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> Mapping[str, Tensor]:
    """Return the whole tensors of `hf_folder` by our names, all or only `names`, in `dtype` (None: as stored).

    All names and shapes are checked at once; each tensor is read on access. Raises CheckpointError for unknown,
    missing or damaged tensors, ConfigError for those of another architecture, UnsupportedError for quantised ones.
    """
    path = Path(hf_folder).expanduser()
    folder = HfFolder(path)
    shapes, table = stored_shapes(architecture), name_map(architecture).spelled_as(folder.names)
    theirs = table.account(folder.names, shapes, str(path))
    folder.require_floats()
    _require_shapes(folder, theirs, {name: their_shape(table.rename_of(name), shapes[name]) for name in shapes})
    if architecture.tie_embeddings and HEAD in folder.names:
        _require_copy(folder, theirs["embedding.weight"][0])
    _remark_differences(path, architecture)
    return HfWeights(folder, {name: theirs[name] for name in (theirs if names is None else names)}, table, dtype)


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
    if folder.shape(HEAD) != folder.shape(embedding) or not torch.equal(folder.read(HEAD), folder.read(embedding)):
        raise CheckpointError(
            f"{folder.path}: {HEAD} differs from {embedding}, but the architecture ties the two: "
            "set tie_word_embeddings to false in config.json (or model.options.tie_embeddings = false in the job)"
        )


def _remark_differences(path: Path, architecture: LlamaArchitecture) -> None:
    """Warn about fields in which the architecture differs from the config of these weights."""
    if not (path / "config.json").is_file():
        return
    trained_as = architecture_from_hf(read_json(path / "config.json"), str(path / "config.json"))
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
