"""Export of a checkpoint as a Hugging Face folder, tensor by tensor.

As a process (meshwright.checkpoint.background.step_worker) it exports a run's checkpoints while it trains; an export is
removed with its checkpoint. A killed one leaves a temporary folder, which the next process removes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from meshwright.checkpoint.background.helper_process import serve_steps
from meshwright.checkpoint.format.durable import remove_stale
from meshwright.checkpoint.format.find_checkpoint import is_hugging_face
from meshwright.checkpoint.hf.find_hf_model import hf_model
from meshwright.checkpoint.hf.hf_model import HfModel
from meshwright.checkpoint.hf.output_folder import Replaceable, output_folder, require_target
from meshwright.checkpoint.hf.side_files import SIDE_FILES, write_side_files
from meshwright.checkpoint.merged_reader import plain_reader
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.peft.write_adapter import PEFT_FOLDER, SavedAdapter
from meshwright.checkpoint.safetensors.rounding import warn_of_float64
from meshwright.checkpoint.safetensors.weight_files import divide, output_tensors, write_files
from meshwright.checkpoint.safetensors.weight_index import CONFIG, WEIGHT_FILES, read_json
from meshwright.checkpoint.saved_model import SavedModel, find_saved_model
from meshwright.errors import ConfigError
from meshwright.log import logger
from meshwright.spec.model.hf.name_map import BUFFER
from meshwright.spec.run.run import Run

ExportDType = Literal["float32", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_REPLACEABLE = Replaceable(is_hugging_face, re.compile(f"{SIDE_FILES}|{WEIGHT_FILES}"))


@dataclass(frozen=True)
class ExportFormat:
    """How weights are stored in a Hugging Face folder."""

    dtype: ExportDType = "float32"
    """Weights are rounded to it."""
    max_shard_bytes: int = 5_000_000_000
    """Bytes of the tensors in one file; a larger tensor has a file of its own."""


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    model: SavedModel
    num_parameters: int
    num_files: int
    num_bytes: int


@dataclass(frozen=True)
class ExportRequest:
    """What is exported, and how."""

    source: Path
    """A run or a checkpoint folder."""
    out: Path
    """The new Hugging Face folder."""
    step: int | None = None
    """Checkpoint of the run; None is the newest."""
    weights: ExportFormat = ExportFormat()
    overwrite: bool = False
    """Whether `out` may be a folder of the kind that is written and holds nothing else, which is replaced."""
    merge: bool = False
    """Whether an adapter is added to the weights of its model, which are all written; else it is written alone."""


def export(
    source: Path,
    out: Path,
    *,
    step: int | None = None,
    weights: ExportFormat = ExportFormat(),
    overwrite: bool = False,
) -> Exported:
    """Do what `export_together` does in this process alone."""
    return export_together(ExportRequest(source, out, step, weights, overwrite), GroupPeers(is_alone=True))


def export_together(
    request: ExportRequest,
    peers: GroupPeers,
    verify: Callable[[SavedModel, Path], None] = lambda model, folder: None,
) -> Exported:
    """Write a model as a new Hugging Face folder, or an adapter as PEFT's; a collective of `peers`, who share the work.

    A class of the user's is written by the table of its attribute `hugging_face`, whose errors are ConfigErrors.
    Memory of each is that of the largest fused tensor, or of some 64 MiB. The folder is created atomically, after
    `verify` of what was written has returned on rank 0. Raises ConfigError if it exists, CheckpointError for a damaged
    source or a full disk, UnsupportedError for a model that transformers lacks.
    """
    out, weights = request.out, request.weights
    model = find_saved_model(request.source, request.step)
    has_adapter = model.job.adapter.freezes_base
    if request.merge and not has_adapter:
        raise ConfigError(f"{request.source} has no adapter ([adapter]) to merge: leave out --merge")
    is_alone = has_adapter and not request.merge
    replaceable = PEFT_FOLDER if is_alone else _REPLACEABLE
    require_target(out, "export", replaceable if request.overwrite else None)
    described = hf_model(model.section)
    if is_alone:
        return _export_adapter(request, model, described, peers)
    # Raises for a model that transformers lacks.
    config, shapes = described.config(), described.shapes
    _remark_other_type(model, config["model_type"])
    saved = plain_reader(model)
    saved.require(shapes)
    if peers.rank == 0:
        warn_of_float64(saved.dtypes, model.checkpoint)
    # A router's bias stays float32, as in transformers.
    dtypes = {name: torch.float32 if name.startswith(BUFFER) else DTYPES[weights.dtype] for name in shapes}
    outputs = output_tensors(described.name_map(), shapes, dtypes)
    files = divide(outputs, weights.max_shard_bytes)
    with output_folder(out, sum(output.num_bytes for output in outputs), peers) as folder:
        folder.write(lambda: write_side_files(model, described, folder.path, weights.dtype), on_rank=0)
        num_bytes = write_files(files, saved, folder)
        folder.write(lambda: verify(model, folder.path), on_rank=0)
    return Exported(model, described.num_parameters, len(files), num_bytes)


def _export_adapter(request: ExportRequest, model: SavedModel, described: HfModel, peers: GroupPeers) -> Exported:
    adapter = SavedAdapter(model, described)
    if peers.rank == 0:
        warn_of_float64(adapter.dtypes, model.checkpoint)
    dtype = DTYPES[request.weights.dtype]
    with output_folder(request.out, adapter.num_parameters * dtype.itemsize, peers) as folder:
        num_bytes = adapter.write(folder, dtype)
    return Exported(model, adapter.num_parameters, 1, num_bytes)


def _remark_other_type(model: SavedModel, written: str) -> None:
    """Warn where an imported model leaves as one of another family."""
    imported = read_json(model.run.folder / CONFIG).get("model_type") if model.is_imported else None
    if imported not in (None, written):
        given = (model.run.folder, imported, written)
        logger.warning("%s was imported as %s and is exported as %s, which computes the same", *given)


def main(options: dict[str, Any]) -> None:
    """Export the steps that arrive on standard input as RUN/exports/step-N, until it ends."""
    # The cores are the training's.
    torch.set_num_threads(1)
    run, weights = Run(options["run"]), ExportFormat(options["dtype"])
    if run.exports.is_dir():
        remove_stale(run.exports)

    def act(step: int) -> int:
        return export(run.folder, run.export(step), step=step, weights=weights).num_bytes

    serve_steps(options["niceness"], act)
