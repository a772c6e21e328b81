"""describe_run: the folders in a run's checkpoints, from indexes and sizes; needs no torch and reads no tensor."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.checkpoint.format.manifest import (
    Index,
    hash_bytes,
    manifest_name,
    read_file,
    read_index,
    size_problem,
    step_of,
)
from meshwright.errors import CheckpointError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.run.checkpoint_record import CheckpointRecord, CheckpointState
from meshwright.spec.run.retention import RetentionRule, kept_because
from meshwright.spec.run.run import Run

_KIND = re.compile(r"step-\d+\.(?P<kind>tmp|damaged|left)-[0-9a-f]{32}")


def describe_run(
    run: Run, rule: RetentionRule, *, is_running: bool, now_s: Callable[[], float] = time.time
) -> list[CheckpointRecord]:
    """Return what lies in the checkpoints of `run`, oldest step first; `is_running`: whether a process trains into it.

    Files that vanish while this reads are left out.
    """
    if not run.checkpoints.is_dir():
        return []
    found = []
    for folder in sorted(run.checkpoints.iterdir()):
        try:
            if folder.is_dir():
                found.append(_describe(folder, is_running=is_running, now_s=now_s()))
        except FileNotFoundError:
            continue
    losses = {one.step: one.validation_loss for one in found if one.state == "complete" and one.step is not None}
    reasons = kept_because(losses, rule)
    records = [
        one.replace(kept_because=reasons.get(one.step, [])) if one.state == "complete" and one.step is not None else one
        for one in found
    ]
    return sorted(records, key=lambda one: (one.step is None, one.step or 0, one.name))


def validation_losses(run: Run) -> dict[int, float | None]:
    """Return the validation loss of each committed checkpoint by step, None where its index has or shows none."""
    losses: dict[int, float | None] = {}
    for step in run.checkpoint_steps():
        try:
            losses[step] = loss_of(read_index(run.checkpoint(step)).metadata)
        except CheckpointError:
            losses[step] = None
    return losses


def loss_of(metadata: dict[str, Any]) -> float | None:
    """Return the validation loss in a checkpoint's metadata, if any."""
    loss = metadata.get("validation_loss")
    return float(loss) if isinstance(loss, int | float) else None


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in `folder`."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _describe(folder: Path, *, is_running: bool, now_s: float) -> CheckpointRecord:
    times = [path.lstat().st_mtime for path in folder.iterdir()] or [folder.stat().st_mtime]
    state, index, problem = _state(folder, is_running=is_running)
    metadata = {} if index is None else index.metadata
    return CheckpointRecord(
        name=folder.name,
        step=step_of(folder),
        state=state,
        num_bytes=folder_bytes(folder),
        age_s=max(0.0, now_s - max(times)),
        layout=_layout_text(metadata),
        num_ranks=None if index is None else len(index.ranks),
        validation_loss=loss_of(metadata),
        problem=problem,
    )


def _state(folder: Path, *, is_running: bool) -> tuple[CheckpointState, Index | None, str | None]:
    """Return a folder's state, its index where that can be read, and what is damaged."""
    kind = match["kind"] if (match := _KIND.fullmatch(folder.name)) else None
    if kind == "tmp":
        # Every save first removes what an earlier one left, so what is left in a running run is being written.
        return ("being written" if is_running else "leftover"), None, None
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return ("set aside" if kind else "damaged"), None, str(error)
    problem = next((found for rank in range(len(index.ranks)) if (found := _file_problem(folder, index, rank))), None)
    if kind:
        return "set aside", index, problem
    return ("complete" if problem is None else "damaged"), index, problem


def _file_problem(folder: Path, index: Index, rank: int) -> str | None:
    """Return which file of a rank is missing, has another size, or is a damaged manifest; None for neither."""
    if index.manifests is None:
        try:
            data = read_file(folder, manifest_name(rank))
        except CheckpointError as error:
            return str(error)
        if hash_bytes(data) != index.ranks[rank].manifest_xxh3_128:
            return f"{folder / manifest_name(rank)} is damaged (its hash differs)"
    if index.manifests is not None and index.ranks[rank].num_bytes == 0:
        return None  # format 1 has no file of a rank that saved nothing
    return size_problem(folder, index, rank)


def _layout_text(metadata: dict[str, Any]) -> str | None:
    try:
        return layout_text(Layout.from_dict(metadata["layout"]))
    except (KeyError, ValidationError):
        return None
