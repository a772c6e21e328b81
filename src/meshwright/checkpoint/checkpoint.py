"""Saving of a training state as one directory, atomically, and loading of it in place on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from meshwright.checkpoint.contents import Contents, StoredTensor, dtype_name, read_contents
from meshwright.checkpoint.durable import remove
from meshwright.checkpoint.planned import ProcessGroup, flatten, has_group, held_by_any, one_error_for_all, raise_on_all
from meshwright.checkpoint.reader import Reader, file_problems, read_chunk
from meshwright.checkpoint.writer import Writer
from meshwright.errors import CheckpointError
from meshwright.spec.run.run import Run
from meshwright.units import first_of

_SAME_JOB = "set [model] and [optimizer] to what they were when it was saved"


def save(folder: Path, state: Mapping[str, Any], metadata: dict[str, Any], group: ProcessGroup = None) -> None:
    """Commit `state`, nested dicts of tensors and DTensors, as `folder`, with JSON `metadata`; a collective.

    Ranks may hold different names, such as those of their stage; each shard is saved once, by one of its ranks, and
    metadata by rank 0. On return the checkpoint is on disk. Raises CheckpointError on all ranks if any rank fails;
    then `folder` does not exist and older checkpoints are unchanged.
    """
    writer = Writer(folder, metadata)
    try:
        with one_error_for_all("saving failed"):
            dcp.save(
                {name: copies[0] for name, copies in flatten(state).items()},
                storage_writer=writer,
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=not has_group(),
            )
    except (CheckpointError, KeyboardInterrupt):
        writer.discard()
        raise


def prune(run: Run, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of `run`; call it on one rank, after a save."""
    assert keep >= 1, f"keep = {keep}"
    for step in run.checkpoint_steps()[:-keep]:
        remove(run.checkpoint(step))


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata given to `save`; raises CheckpointError for a damaged checkpoint."""
    return read_contents(folder).metadata


def load(folder: Path, state: Mapping[str, Any], group: ProcessGroup = None) -> dict[str, Any]:
    """Fill the tensors of `state` in place from `folder` and return its metadata; a collective.

    Under each top-level key of `state` all ranks together must hold exactly the saved names, shapes and dtypes; the
    sharding may differ. Raises CheckpointError on all ranks, possibly after some tensors were filled.
    """
    flat = flatten(state)
    contents, problem = None, None
    try:
        contents = read_contents(folder)
        problem = _problem(folder, contents, flat, state.keys(), group)
    except CheckpointError as error:
        problem = str(error)
    raise_on_all(problem, group)
    assert contents is not None
    _require_all_used(folder, contents, flat, state.keys(), group)
    with one_error_for_all("loading failed"):
        dcp.load(
            {name: copies[0] for name, copies in flat.items()},
            storage_reader=Reader(folder, contents),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=not has_group(),
        )
    for first, *others in flat.values():
        for other in others:
            other.copy_(first)
    return contents.metadata


def load_parameters(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the model's whole tensors on the CPU by name, all or only `names`; not a collective.

    Reads and verifies these only; raises CheckpointError for a damaged or missing tensor.
    """
    contents = read_contents(folder)
    stored = {full.removeprefix("model/"): tensor for full, tensor in contents.section("model").items()}
    missing = sorted(set(names or ()) - stored.keys())
    if missing:
        raise CheckpointError(f"{folder} holds no parameter {first_of(missing)}: was it saved from another model?")
    return {name: _whole(folder, name, stored[name]) for name in (stored if names is None else names)}


def _whole(folder: Path, name: str, stored: StoredTensor) -> Tensor:
    whole = torch.empty(stored.shape, dtype=stored.torch_dtype)
    for chunk in stored.chunks:
        box = tuple(slice(start, start + n) for start, n in zip(chunk.offsets, chunk.shape, strict=True))
        whole[box] = read_chunk(folder, f"model/{name}", stored, chunk)
    return whole


def _problem(
    folder: Path, contents: Contents, flat: Mapping[str, list[Tensor]], sections: Collection[str], group: ProcessGroup
) -> str | None:
    """Return the problems that this rank finds, or None; each rank checks some of the files."""
    rank, num_ranks = (dist.get_rank(group), dist.get_world_size(group)) if has_group() else (0, 1)
    problems = file_problems(folder, contents, sorted(contents.file_bytes)[rank::num_ranks])
    if absent := [section for section in sections if not contents.section(section)]:
        sections_here = sorted({name.partition("/")[0] for name in contents.tensors})
        problems.append(
            f"{folder} holds {', '.join(sections_here) or 'nothing'} but no {', '.join(absent)}, so it is no training "
            "state to resume: start a new run from its weights with model.initial_weights"
        )
        return "\n".join(problems)
    saved = _saved(contents, sections)
    if missing := sorted(flat.keys() - saved.keys()):
        problems.append(f"{folder} lacks {first_of(missing)}, which this model or its optimizer has: {_SAME_JOB}")
    different = [
        f"{name} (saved {saved[name].dtype} {list(saved[name].shape)}, "
        f"now {dtype_name(tensor.dtype)} {list(tensor.shape)})"
        for name, copies in flat.items()
        for tensor in copies
        if name in saved and (tuple(tensor.shape), tensor.dtype) != (saved[name].shape, saved[name].torch_dtype)
    ]
    if different:
        problems.append(f"{folder} was saved with other sizes: {first_of(different)}: {_SAME_JOB}")
    return "\n".join(problems) or None


def _require_all_used(
    folder: Path, contents: Contents, flat: Collection[str], sections: Collection[str], group: ProcessGroup
) -> None:
    """Raise CheckpointError on all ranks for a saved tensor that no rank holds; a collective."""
    saved = _saved(contents, sections).keys()
    if unused := sorted(saved - held_by_any(saved, flat, group)):
        raise CheckpointError(
            f"{folder} holds {first_of(unused)}, which this model or its optimizer lacks: {_SAME_JOB}"
        )


def _saved(contents: Contents, sections: Collection[str]) -> dict[str, StoredTensor]:
    return {name: stored for section in sections for name, stored in contents.section(section).items()}
