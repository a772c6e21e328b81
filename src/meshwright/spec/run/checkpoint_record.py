"""CheckpointRecord: what is known of one folder in a run's checkpoints without reading its tensors."""

from typing import Literal

from meshwright.spec.frozen import Frozen
from meshwright.spec.run.retention import RetentionRule

CheckpointState = Literal["complete", "damaged", "being written", "set aside", "leftover"]
"""complete: the index is whole and every file has its size; damaged: not so; being written: of a save of a running
process; set aside: damaged and renamed by a resume; leftover: of a save or removal that was killed."""


class CheckpointRecord(Frozen):
    """One folder of a run's checkpoints."""

    name: str
    """Name of the folder."""
    step: int | None
    """Optimizer steps that were done; None where the name has none."""
    state: CheckpointState
    num_bytes: int
    """Size of its files."""
    age_s: float
    """Seconds since its newest file was written."""
    layout: str | None = None
    """The layout that saved it; None where it says none."""
    num_ranks: int | None = None
    """Ranks that wrote files; None where the index cannot be read."""
    validation_loss: float | None = None
    """The validation loss measured at its step; None where none was."""
    kept_because: list[str] = []
    """Rules of retention that keep it, such as keep_every; empty for what is not complete, or not kept any more."""
    problem: str | None = None
    """What is damaged."""


class MemoryRecord(Frozen):
    """Copies of one run in the memory of this machine."""

    folder: str
    state: Literal["in use", "left", "orphaned"]
    """in use: a process trains; left: of a run that has ended and may be resumed; orphaned: the run is gone."""
    steps: list[int]
    """Optimizer steps that were done, oldest first; other machines may hold the rest of a copy."""
    num_bytes: int
    """Size of its files."""
    age_s: float
    """Seconds since the newest copy."""


class CheckpointListing(Frozen):
    """The checkpoints of a run."""

    folder: str
    """The run folder."""
    is_running: bool
    """Whether a process trains into it."""
    rule: RetentionRule | None
    """What the job of its newest attempt keeps; None in a folder without a manifest."""
    checkpoints: list[CheckpointRecord]
    """Oldest step first."""
    in_memory: list[MemoryRecord] = []
    """Copies in the memory of this machine, of this run and of runs that are gone."""
