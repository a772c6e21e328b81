"""Weights of a Hugging Face folder under our names, checked against an architecture."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.hf.folder import HfFolder
from meshwright.checkpoint.hf.hf_model import BuiltInModel, HfModel
from meshwright.checkpoint.hf.maps.layouts import joined, row_ranges, to_ours
from meshwright.checkpoint.hf.tensor_source import TensorSource
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.safetensors.weight_index import CONFIG, read_json
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.log import logger
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.name_map import NameMap, Rename
from meshwright.units import counted, first_of

_NUM_NAMED = 4
_NO_TENSOR = "no tensor, such as a number of the training state"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class HfWeights(Mapping[str, Tensor]):
    """Mapping from our names to tensors, each read from disk on every access; all keys of the folder accounted for."""

    def __init__(
        self, folder: TensorSource, theirs: dict[str, list[str]], table: NameMap, dtype: torch.dtype | None = None
    ) -> None:
        self.folder = folder
        self.table = table
        self._theirs, self._dtype = theirs, dtype
        self._not_finite: dict[str, None] = {}

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
        renames, theirs = self.table.rows_of(name), self._theirs[name]
        # Names are in the order of the parts, and those of a part in the order of the experts.
        each = len(theirs) // len(renames)
        start, end = rows if rows and renames[0].is_stacked else (0, each)
        of_theirs = rows if renames[0].keeps_rows and not renames[0].is_stacked else None
        parts = [
            to_ours(rename, [self._read(one, of_theirs) for one in theirs[i * each + start : i * each + end]])
            for i, rename in enumerate(renames)
        ]
        return joined(renames, parts).to(self.dtype(name))

    def warn_of_not_finite(self, peers: GroupPeers) -> None:
        """Log a warning if a tensor that was read on any rank holds NaN or infinity; a collective."""
        found = list(dict.fromkeys(name for names in peers.gather(list(self._not_finite)) for name in names))
        if found and peers.rank == 0:
            logger.warning(
                "%s holds NaN or infinity in %s, the first is %s: a loss computed with them is not finite",
                *(self.folder.path, counted(len(found), "tensor"), found[0]),
            )

    def _read(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Return one tensor of the folder or its `rows`, and remember whether it is finite."""
        tensor = self.folder.read(name, rows)
        if not tensor.isfinite().all():
            self._not_finite[name] = None
        return tensor


def load_hf_parameters(
    hf_folder: Path | str,
    architecture: LlamaArchitecture,
    names: Collection[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> HfWeights:
    """Return the tensors of a built-in model as `load_hf_weights` does."""
    return load_hf_weights(hf_folder, BuiltInModel(architecture), names, dtype)


def load_hf_weights(
    hf_folder: Path | str,
    model: HfModel,
    names: Collection[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> HfWeights:
    """Return the whole tensors of `hf_folder` by our names, all or only `names`, in `dtype` (None: as stored).

    All names and shapes are checked at once; each tensor is read on access, those in block-fp8 as bfloat16. Raises
    ConfigError for tensors of another architecture, CheckpointError for damaged ones, UnsupportedError for other
    quantised ones.
    """
    path = Path(hf_folder).expanduser()
    folder = HfFolder(path)
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
    folder.require_floats()
    if others := folder.unread_weights:
        logger.warning("%s also holds %s, which is not read: only model*.safetensors are", path, first_of(others))
    weights = checked_weights(folder, model.name_map(config).spelled_as(folder.names), model.shapes, dtype)
    for field, given in sorted((model.differences(config, str(path / CONFIG)) if config is not None else {}).items()):
        logger.warning("%s: the weights were trained with %s = %s, the model has %s", path, field, *given)
    return weights if names is None else weights.only(names)


def checked_weights(
    source: TensorSource,
    table: NameMap,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None = None,
) -> HfWeights:
    """Return the tensors of `source`, whose names and layouts `table` has, after all of its keys are accounted for."""
    theirs = table.account(source.names, shapes, str(source.path))
    _require_shapes(source, theirs, table, shapes)
    _require_dtypes(source, theirs)
    for name in sorted(source.names):
        if (drop := table.drop_of(name)) is not None and drop.copy_of is not None:
            _require_copy(source, theirs[drop.copy_of][0], name)
    return HfWeights(source, theirs, table, dtype)


def _require_dtypes(source: TensorSource, theirs: dict[str, list[str]]) -> None:
    for name, parts in theirs.items():
        kinds = {source.dtype(part) for part in parts}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{source.path}: the parts of {name}, from {parts[0]} on, have several dtypes "
                f"({', '.join(sorted(map(str, kinds)))}): convert them to one"
            )
        if not kinds <= set(_FLOATS):
            raise UnsupportedError(
                f"{source.path} holds {parts[0]} as {kinds.pop()}, but only float64, float32, bfloat16 and float16 can "
                "be read: take weights that are not quantised"
            )


def _require_shapes(
    folder: TensorSource, theirs: dict[str, list[str]], table: NameMap, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    wrong = []
    for name, names in theirs.items():
        renames = table.rows_of(name)
        expected = [rename.their_shape(shapes[name]) for rename in renames for _ in range(len(names) // len(renames))]
        wrong += [
            f"{one} is {list(folder.shape(one))}, the architecture has {list(shape)}"
            for one, shape in zip(names, expected, strict=True)
            if folder.shape(one) != shape
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
        raise ConfigError(
            f"{source.path}: {head} differs from {embedding}, but the architecture ties the two: "
            "set tie_word_embeddings to false in config.json (or model.options.tie_embeddings = false in the job)"
        )
