"""Import of a Hugging Face folder, tensor by tensor, as a run, which every command that reads a run accepts."""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from meshwright.checkpoint.checkpoint import read_metadata
from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.format.dtypes import dtype_name
from meshwright.checkpoint.format.durable import write_durably
from meshwright.checkpoint.hf.import_source import ImportSource, find_source, open_weights
from meshwright.checkpoint.hf.maps.layouts import row_ranges, share_of
from meshwright.checkpoint.hf.output_folder import Replaceable, output_folder, require_target
from meshwright.checkpoint.hf.side_files import SIDE_FILES, copy_side_files
from meshwright.checkpoint.hf.weights import HfWeights
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.safetensors.weight_index import CONFIG
from meshwright.checkpoint.saved_model import IMPORTED_FROM, MODEL_FIELDS
from meshwright.checkpoint.saving import Extent, SaveRequest, with_bytes, write_checkpoint
from meshwright.checkpoint.shards import Shard
from meshwright.checkpoint.torch_formats.checksums import verify_checksums
from meshwright.config.write import to_toml
from meshwright.data.tokenizer_files import TOKENIZER, advice_to_make_one, other_tokenizer_files
from meshwright.errors import CheckpointError, ExitCode
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import module_dir
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_quantization import QUANTIZATION
from meshwright.spec.model.unseen_fields import fields_unseen_in_shapes
from meshwright.spec.run.run import Manifest, Run


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    run: Run
    job: Job
    """The run's job, which starts from the weights where they are a Hugging Face folder."""
    architecture: LlamaArchitecture | None
    """None for a class of the user's."""
    num_parameters: int
    dtypes: list[str]
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Tensors of the folder that are not in the checkpoint, by reason."""


def import_folder(
    source: Path,
    run_folder: Path,
    *,
    config: Path | None = None,
    job: Job | None = None,
    overwrite: bool = False,
    peers: GroupPeers | None = None,
) -> Imported:
    """Write the weights of `source`, bitwise unchanged, as checkpoint step-0 of the new run `run_folder`.

    `source` is a Hugging Face folder, whose block-fp8 weights become bfloat16, the hub id of a downloaded model, a
    torch.save file or a torch.distributed.checkpoint folder; `config` is its config.json, or the folder of that and the
    tokenizer, if another. `job` names a class of the user's, whose attribute `hugging_face` maps the tensors of a
    Hugging Face folder; without it config.json says what the model is. A collective of `peers`, which share the
    work; None is this process alone. Memory is that of the largest tensor whose layout changes, or of some 64 MiB. The
    run is created atomically; with `overwrite` it may replace an imported run that was not trained. Raises ConfigError
    if `run_folder` exists, CheckpointError for a damaged source or a full disk, UnsupportedError for an unknown model,
    or a class without a table.
    """
    require_target(run_folder, "import", _REPLACEABLE if overwrite else None)
    found = find_source(source, config)
    peers = peers or GroupPeers(is_alone=True)
    share = (peers.rank, peers.num_ranks)
    has_checksums = not source.is_file() or peers.on_all(lambda: verify_checksums(source, source, share))
    model, weights = open_weights(found, job)
    if peers.rank == 0:
        _remark(found, has_checksums=has_checksums)
    shapes, count = model.shapes, model.num_parameters
    num_bytes = sum(prod(shape) * weights.dtype(name).itemsize for name, shape in shapes.items())
    with output_folder(run_folder, num_bytes, peers) as new:
        run = Run(new.path)

        # Training starts from Hugging Face folders only.
        start, has_tokenizer = str(source) if found.is_hf else None, (found.side / TOKENIZER).is_file()
        of_run = _own_job(job, start) if job else _job(start, run_folder, has_tokenizer=has_tokenizer)

        def describe() -> None:
            copy_side_files(found.side, run.folder)
            _write_config(found, run.folder / CONFIG)
            manifest = Manifest(
                job=of_run,
                module_dir=module_dir(of_run.model.source),
                seed=of_run.train.seed,
                num_parameters=count,
                exit=ExitCode.DONE,
            )
            write_durably(run.manifest, manifest.to_json())
            write_durably(run.job, to_toml(of_run))

        new.write(describe, on_rank=0)
        fields = None if model.architecture is None else fields_unseen_in_shapes(model.architecture)
        metadata = {"step": 0, IMPORTED_FROM: str(source), MODEL_FIELDS: fields}
        _write_weights(weights, shapes, run.checkpoint(0), metadata, new.peers)
        weights.warn_of_not_finite(new.peers)
    dtypes = sorted({dtype_name(weights.dtype(name)) for name in shapes})
    return Imported(Run(run_folder), of_run, model.architecture, count, dtypes, weights.dropped)


def _remark(found: ImportSource, *, has_checksums: bool) -> None:
    """Log a warning of each thing about the source that the imported run will not show."""
    if not has_checksums:
        logger.warning("%s has no checksums, so a change of its bytes would not be noticed", found.path)
    if others := other_tokenizer_files(found.side):
        given = (found.side, " and ".join(others), TOKENIZER, advice_to_make_one(str(found.side), str(found.side)))
        logger.warning("%s has %s and no %s, so the run's data.tokenizer is bytes: %s, to be imported again", *given)


def _write_weights(
    weights: HfWeights,
    shapes: dict[str, tuple[int, ...]],
    checkpoint: Path,
    metadata: dict[str, Any],
    peers: GroupPeers,
) -> None:
    """Write all tensors as one checkpoint, each rank its share; a problem of the source is raised as it is."""
    tensors = {f"model/{name}": (dtype_name(weights.dtype(name)), shape) for name, shape in shapes.items()}
    problems: list[CheckpointError] = []
    pieces = _pieces(weights, shapes)
    own = share_of([num_bytes for *_, num_bytes in pieces], peers.rank, peers.num_ranks)
    extents = _extents(weights, shapes, [pieces[i][:2] for i in own], problems)

    try:
        write_checkpoint(SaveRequest(checkpoint, metadata, ["model"], tensors), extents, peers)
        return
    except CheckpointError as error:
        failure = error
    # All ranks are here if one is.
    if of_source := [problem for each in peers.gather(problems) for problem in each]:
        raise of_source[0] from failure
    what = re.sub(r"saving failed on rank \d+( and \d+ more)?: ", "", str(failure)).partition("; ")[0]
    raise CheckpointError(f"{what}, and was removed: free space there, or name a folder on another disk") from failure


def _pieces(weights: HfWeights, shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, int], int]]:
    """Return name, rows and bytes of what is read at once, for all tensors."""
    pieces = []
    for name, shape in shapes.items():
        itemsize = weights.dtype(name).itemsize
        for start, end in row_ranges(weights.table.rows_of(name)[0], shape, itemsize):
            pieces.append((name, (start, end), (end - start) * prod(shape[1:]) * itemsize))
    return pieces


def _extents(
    weights: HfWeights,
    shapes: dict[str, tuple[int, ...]],
    pieces: Iterable[tuple[str, tuple[int, int]]],
    problems: list[CheckpointError],
) -> Iterator[tuple[Extent, memoryview]]:
    """Yield these pieces, and append what the source raises to `problems`."""
    try:
        for name, rows in pieces:
            shape, data = shapes[name], weights.read(name, rows)
            box = Box((rows[0], *(0 for _ in shape[1:])) if shape else (), tuple(data.shape))
            yield from with_bytes([Shard(f"model/{name}", dtype_name(data.dtype), shape, box, data)])
    except CheckpointError as error:
        problems.append(error)
        raise


def _write_config(found: ImportSource, path: Path) -> None:
    """Write the source's config.json, bit by bit unless it names a quantisation, which the weights no longer have."""
    if QUANTIZATION not in found.values:
        shutil.copyfile(found.config, path)
        return
    plain = {key: value for key, value in found.values.items() if key != QUANTIZATION}
    path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def _own_job(job: Job, weights: str | None) -> Job:
    """Return the job of a user's class, which starts from these weights."""
    return job.replace(model=job.model.replace(initial_weights=weights), run=job.run.replace(dir=None))


def _job(weights: str | None, run_folder: Path, *, has_tokenizer: bool) -> Job:
    model = {"source": str(run_folder / CONFIG)}
    return Job.from_dict(
        {
            "model": model if weights is None else {**model, "initial_weights": weights},
            "data": {"tokenizer": str(run_folder / TOKENIZER)} if has_tokenizer else {},
            # -1: sharded over all ranks.
            "layout": {"dp_shard": -1},
        }
    )


def _is_untrained_import(folder: Path) -> bool:
    run = Run(folder)
    is_new = run.manifest.is_file() and run.checkpoint_steps() == [0]
    return is_new and IMPORTED_FROM in read_metadata(run.checkpoint(0))


_REPLACEABLE = Replaceable(
    _is_untrained_import,
    re.compile(
        rf"{SIDE_FILES}|manifest\.json|job\.toml|checkpoints/step-0/(checkpoint\.json|rank-[0-9]{{5,}}\.(json|bin))"
    ),
)
