"""save: a training state as one directory that appears whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp

from meshwright.checkpoint.durable import remove
from meshwright.checkpoint.planned import Group, flatten, has_group, one_error_for_all
from meshwright.checkpoint.writer import Writer
from meshwright.errors import CheckpointError
from meshwright.spec.run.run import Run


def save(folder: Path, state: Mapping[str, Any], metadata: dict[str, Any], group: Group = None) -> None:
    """Commit `state`, nested dicts of tensors and DTensors, as `folder`, with JSON `metadata`; a collective.

    Ranks may give different names, such as those of their stage: all are saved, each box of a tensor once, by one of
    the ranks that hold it. The first rank's metadata counts. On return the checkpoint is on disk. Raises
    CheckpointError on all ranks alike if any rank fails; then `folder` is not there and older ones are untouched.
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
