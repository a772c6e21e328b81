"""Weights of a Hugging Face folder under our names, checked against an architecture."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.hf.folder import CONFIG, HfFolder, read_json
from meshwright.checkpoint.hf.maps.families import COPY, name_map, stored_shapes
from meshwright.checkpoint.hf.maps.layouts import row_ranges, their_shape, to_ours
from meshwright.checkpoint.hf.maps.name_map import Drop, NameMap, Rename
from meshwright.checkpoint.hf.tensor_source import TensorSource
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.log import logger
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_from_hf
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.units import first_of

_NUM_NAMED = 4
_NO_TENSOR = "no tensor, such as a number of the training state"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_OUR_HEAD = "head.weight"
# Fields that do not change shapes, but change what the same tensors compute.
_UNSEEN_IN_SHAPES = (
    *("norm_eps", "rope_theta", "rope_scaling", "yarn", "rope_interleaved", "sliding_window", "layer_types"),
    *("experts_per_token", "swiglu_limit"),
)
_UNSEEN_OF_ROUTER = ("score", "normalize_weights", "weight_scale", "num_groups", "groups_per_token")


class HfWeights(Mapping[str, Tensor]):
    """Mapping from our names to tensors, each read from disk on every access; all keys of the folder accounted for."""

    def __init__(
        self, folder: TensorSource, theirs: dict[str, list[str]], table: NameMap, dtype: torch.dtype | None = None
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

    def only(self, names: Collection[str]) -> HfWeights:
        """Return the mapping of these names."""
        return HfWeights(self.folder, {name: self._theirs[name] for name in names}, self.table, self._dtype)

    @property
    def dropped(self) -> dict[str, list[str]]:
        """Return their names of what is ignored, by reason."""
        others = {_NO_TENSOR: sorted(self.folder.others)} if self.folder.others else {}
        return {**self.table.dropped(self.folder.names), **others}

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
    folder.require_floats()
    weights = checked_weights(folder, _name_map(architecture, config).spelled_as(folder.names), architecture, dtype)
    if config is not None:
        _remark_differences(path, config, architecture)
    return weights if names is None else weights.only(names)


def checked_weights(
    source: TensorSource, table: NameMap, architecture: LlamaArchitecture, dtype: torch.dtype | None = None
) -> HfWeights:
    """Return the tensors of `source`, whose names and layouts `table` has, after all of its keys are accounted for."""
    shapes = stored_shapes(architecture)
    head = next((rename.theirs for rename in table.renames if rename.ours == _OUR_HEAD), None)
    if architecture.tie_embeddings and head is not None:
        table = replace(
            table,
            renames=tuple(rename for rename in table.renames if rename.ours != _OUR_HEAD),
            drops=(*table.drops, Drop(head, COPY)),
        )
    theirs = table.account(source.names, shapes, str(source.path))
    _require_shapes(source, theirs, {name: their_shape(table.rename_of(name), shapes[name]) for name in shapes})
    _require_dtypes(source, theirs)
    for name in table.dropped(source.names).get(COPY, []):
        _require_copy(source, theirs["embedding.weight"][0], name)
    return HfWeights(source, theirs, table, dtype)


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


def _require_dtypes(source: TensorSource, theirs: dict[str, list[str]]) -> None:
    for name, parts in theirs.items():
        kinds = {source.dtype(part) for part in parts}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{source.path}: the experts of {name}, from {parts[0]} on, have several dtypes "
                f"({', '.join(sorted(map(str, kinds)))}): convert them to one"
            )
        if not kinds <= set(_FLOATS):
            raise UnsupportedError(
                f"{source.path} holds {parts[0]} as {kinds.pop()}, but only float64, float32, bfloat16 and float16 can "
                "be read: take weights that are not quantised"
            )


def _require_shapes(folder: TensorSource, theirs: dict[str, list[str]], shapes: dict[str, tuple[int, ...]]) -> None:
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


def _require_copy(source: TensorSource, embedding: str, head: str) -> None:
    shape = source.shape(embedding)
    ranges = row_ranges(Rename(embedding, head), shape, source.dtype(embedding).itemsize)
    if source.shape(head) != shape or not all(
        torch.equal(source.read(head, rows), source.read(embedding, rows)) for rows in ranges
    ):
        raise CheckpointError(
            f"{source.path}: {head} differs from {embedding}, but the architecture ties the two: "
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
