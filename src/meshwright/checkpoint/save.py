"""Saving of a training state as one directory, atomically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp

from meshwright.checkpoint.durable import remove
from meshwright.checkpoint.planned import ProcessGroup, flatten, has_group, one_error_for_all
from meshwright.checkpoint.writer import Writer
from meshwright.errors import CheckpointError
from meshwright.spec.run.run import Run


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
