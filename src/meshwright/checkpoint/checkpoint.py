"""Checkpoints of a training state: save, load, load_newest, load_parameters."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.format.dtypes import torch_dtype
from meshwright.checkpoint.format.durable import temporary_sibling
from meshwright.checkpoint.format.manifest import read_index, read_manifest, without_remedy
from meshwright.checkpoint.format.saved import Saved, saved_in
from meshwright.checkpoint.loading import fill, load
from meshwright.checkpoint.peers import GroupPeers, ProcessGroup
from meshwright.checkpoint.saving import SaveRequest, with_bytes, write_checkpoint
from meshwright.checkpoint.shards import Shard, flatten, local_shards, owned_shards
from meshwright.errors import CheckpointError, DamagedCheckpoint
from meshwright.log import logger
from meshwright.spec.run.run import Run
from meshwright.units import first_of


class CopyInMemory(Protocol):
    """A copy of the state that is not on disk, such as memory.find_copy.FoundCopy."""

    @property
    def step(self) -> int:
        """Return the steps that its state has done."""

    def load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `state` in place and return the metadata; a collective."""


__all__ = ["load", "load_newest", "load_parameters", "newest_intact", "read_metadata", "save"]


def save(folder: Path, state: Mapping[str, Any], metadata: dict[str, Any], group: ProcessGroup = None) -> None:
    """Commit `state`, nested dicts of tensors and DTensors, as `folder`, with JSON `metadata`; a collective.

    Ranks may hold different names, such as those of their stage; each element is saved once, large boxes by all of
    their replicas in parts, and the metadata of rank 0. On return the checkpoint is on disk. Raises CheckpointError on
    all ranks if any rank fails; then `folder` does not exist and older checkpoints are unchanged.
    """
    peers = GroupPeers(group)
    shards = local_shards(flatten(state))
    write_checkpoint(save_request(folder, state, metadata, shards), with_bytes(owned_shards(shards, peers)), peers)


def save_request(
    folder: Path, state: Mapping[str, Any], metadata: dict[str, Any], shards: Collection[Shard]
) -> SaveRequest:
    """Return what the ranks that save `state` agree on."""
    return SaveRequest(folder, metadata, sorted(state), {shard.name: (shard.dtype, shard.shape) for shard in shards})


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata given to `save`; raises CheckpointError for a damaged checkpoint."""
    return read_index(folder).metadata


def saved_sections(folder: Path) -> list[str]:
    """Return the top-level keys of the state that was saved; raises CheckpointError for a damaged checkpoint."""
    return read_index(folder).sections


def load_newest(
    run: Run, state: Mapping[str, Any], in_memory: CopyInMemory | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint whose every byte is as it was saved; None if there is none; a collective.

    The copy `in_memory` is one of them, and of the same step the first. Returns step and metadata, as `newest_intact`.
    """
    return newest_intact(run, lambda folder: load(folder, state), GroupPeers(), in_memory=_loads(in_memory, state))


def load_earlier(run: Run, state: Mapping[str, Any], every: int) -> tuple[int, dict[str, Any]] | None:
    """Load the newest intact checkpoint after a multiple of `every` steps, and leave newer ones behind; a collective.

    Those are renamed to step-N.left-ID. Returns as `load_newest`.
    """
    peers = GroupPeers()
    found = newest_intact(run, lambda folder: load(folder, state), peers, every)
    if found is not None and peers.rank == 0:
        for step in run.checkpoint_steps():
            if step > found[0]:
                _set_aside(run.checkpoint(step), "left")
    return found


def newest_intact(
    run: Run,
    load_one: Callable[[Path], dict[str, Any]],
    peers: GroupPeers,
    every: int = 1,
    in_memory: Mapping[int, Callable[[], dict[str, Any]]] | None = None,
) -> tuple[int, dict[str, Any]] | None:
    """Return the step that `load_one`, a collective, loads first of the newest ones, and what it returned.

    Only steps that are multiples of `every` count. `in_memory` has what loads copies in memory, by step.
    Damaged newer ones are renamed to step-N.damaged-ID, so that the run can save their steps again, and named in a
    warning. Raises CheckpointError if all are damaged, or for another reason than damage.
    """
    # Rank 0 decides: on another host a shared folder may not show the newest checkpoint yet.
    steps: list[int] = peers.publish([step for step in run.checkpoint_steps() if step % every == 0])
    copies = in_memory or {}
    damaged: dict[int, str] = {}
    problems: list[str] = []
    for step, is_copy in sorted([*((step, False) for step in steps), *((step, True) for step in copies)], reverse=True):
        try:
            metadata = copies[step]() if is_copy else load_one(run.checkpoint(step))
        except DamagedCheckpoint as error:
            problems.append(str(error))
            if is_copy:
                logger.warning("the copy of step %d in memory is refused: %s", step, without_remedy(str(error)))
            else:
                damaged[step] = str(error)
            continue
        for other, problem in damaged.items():
            logger.warning("step-%d is skipped, and step-%d loaded: %s", other, step, without_remedy(problem))
            if peers.rank == 0:
                _set_aside(run.checkpoint(other), "damaged")
        return step, metadata
    if problems:
        listed = "\n".join(map(without_remedy, problems))
        raise DamagedCheckpoint(
            f"no checkpoint of this run can be loaded:\n{listed}\n"
            "nothing was changed: restore one of them from a copy, or start again with --overwrite"
        )
    return None


def _loads(copy: CopyInMemory | None, state: Mapping[str, Any]) -> dict[int, Callable[[], dict[str, Any]]]:
    return {} if copy is None else {copy.step: lambda: copy.load(state)}


def load_parameters(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the model's whole tensors on the CPU by name, all or only `names`; not a collective.

    Reads and verifies these only; raises CheckpointError for a damaged or missing tensor.
    """
    saved = saved_tensors(folder, ["model"])
    stored = {full.removeprefix("model/"): parts for full, parts in saved.items()}
    if missing := sorted(set(names or ()) - stored.keys()):
        raise CheckpointError(f"{folder} holds no parameter {first_of(missing)}: was it saved from another model?")
    return {name: read_whole(folder, stored[name]) for name in (stored if names is None else names)}


def saved_tensors(folder: Path, sections: Collection[str] | None = None) -> dict[str, list[Saved]]:
    """Return the saved shards of every tensor, of all sections or of `sections`, by full name; not a collective."""
    index = read_index(folder)
    tensors: dict[str, list[Saved]] = {}
    for rank in range(len(index.ranks)):
        for saved in saved_in(read_manifest(folder, index, rank), index.sections if sections is None else sections):
            tensors.setdefault(saved.name, []).append(saved)
    return tensors


def read_whole(folder: Path, parts: list[Saved]) -> Tensor:
    """Return one tensor from all of its saved shards."""
    name, dtype, shape, *_ = parts[0]
    whole = torch.empty(shape, dtype=torch_dtype(dtype))
    shard = Shard(name, dtype, shape, Box((0,) * len(shape), shape), whole)
    fill(folder, [shard], [[part for part in parts if part.shard is not None]])
    return whole


def _set_aside(folder: Path, kind: str) -> None:
    """Rename a checkpoint, so that it is kept and the run can save its step again."""
    aside = temporary_sibling(folder, kind)
    try:
        folder.rename(aside)
        logger.warning("%s is now %s: remove it when you no longer need it", folder.name, aside.name)
    except FileNotFoundError:
        # Another independent replica, which reads the same checkpoints, has done it.
        return
    except OSError as error:
        logger.warning("%s could not be renamed (%s): move it away before its step is saved", folder, error.strerror)
