"""Export of a checkpoint as a plain torch.distributed.checkpoint folder, tensor by tensor."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from meshwright.checkpoint.hf.export import DTYPES, ExportDType, Exported
from meshwright.checkpoint.hf.hf_model import BuiltInModel
from meshwright.checkpoint.hf.output_folder import Replaceable, output_folder, require_target
from meshwright.checkpoint.hf.side_files import SIDE_FILES, write_side_files
from meshwright.checkpoint.merged_reader import plain_reader
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.safetensors.rounding import rounded, warn_of_float64
from meshwright.checkpoint.saved_model import SavedModel, find_saved_model
from meshwright.checkpoint.torch_formats.dcp_folder import FILE_NAME
from meshwright.errors import CheckpointError, UnsupportedError
from meshwright.spec.model.hf.hf_config import hf_obstacles
from meshwright.spec.model.hf.name_map import BUFFER

_REPLACEABLE = Replaceable(
    lambda folder: (folder / FILE_NAME).is_file(),
    re.compile(rf"{re.escape(FILE_NAME)}|__[0-9]+_[0-9]+\.distcp|{SIDE_FILES}"),
)


class _ReadingPlanner(dcp.DefaultSavePlanner):
    """Planner that reads each tensor when its turn to be written has come; the state holds none of them."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._read(index.fqn)


def export_dcp(
    source: Path, out: Path, *, step: int | None = None, dtype: ExportDType = "float32", overwrite: bool = False
) -> Exported:
    """Write the model in `source` as the new folder `out`, which torch.distributed.checkpoint.load reads.

    Names are those of the model's state_dict; an adapter is added to the weights. `out` also holds config.json and the
    tokenizer where transformers has such a model, so it can be imported again. With `overwrite` it may replace another
    such folder. Raises ConfigError if `out` exists, CheckpointError for a damaged source or a full disk,
    UnsupportedError for a class of the user's.
    """
    require_target(out, "export", _REPLACEABLE if overwrite else None)
    model = find_saved_model(source, step)
    _require_built_in(model)
    saved = plain_reader(model)
    described = BuiltInModel(model.architecture)
    shapes = described.shapes
    saved.require(shapes)
    warn_of_float64(saved.dtypes, model.checkpoint)
    dtypes = {name: torch.float32 if name.startswith(BUFFER) else DTYPES[dtype] for name in shapes}
    ours = {name.removeprefix(BUFFER): name for name in shapes}
    state = {name: torch.empty(shapes[own], dtype=dtypes[own], device="meta") for name, own in ours.items()}
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    with output_folder(out, num_bytes, GroupPeers(is_alone=True)) as folder:

        def write() -> None:
            _save(state, folder.path, lambda name: rounded(saved.read(ours[name]), state[name].dtype, name))
            if not hf_obstacles(model.architecture):
                write_side_files(model, described, folder.path, dtype)

        folder.write(write)
    return Exported(model, described.num_parameters, len(state), num_bytes)


def _require_built_in(model: SavedModel) -> None:
    if model.built_in is None:
        raise UnsupportedError(
            f"{model.run.folder} trained the class {model.section.source}: --format dcp writes built-in models only. "
            "--format hf, the default, writes a class that has the attribute hugging_face (see "
            "docs/how_to/own_model.md), and without it "
            f"meshwright.checkpoint.checkpoint.load_parameters(Path({str(model.checkpoint)!r})) returns the tensors"
        )


def _save(state: dict[str, Tensor], folder: Path, read: Callable[[str], Tensor]) -> None:
    with warnings.catch_warnings():
        # That it runs in one process is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # torch's writer keeps the tensors of a file until it is complete, so each tensor has a file.
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=True)
        try:
            dcp.save(state, storage_writer=writer, planner=_ReadingPlanner(read), no_dist=True)
        except CheckpointException as error:
            # The only rank's own error, with its traceback as text.
            cause = next(iter(error.failures.values()))[0]
            # A signal's exception is not torch's, and passes as it is.
            if isinstance(cause, (CheckpointError, OSError)) or not isinstance(cause, Exception):
                raise cause from None
            raise CheckpointError(f"{folder.parent} could not be written to ({cause}): free space there") from error
