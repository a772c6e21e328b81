"""Heartbeat: where one rank's training loop is, as the loop itself last said."""

from __future__ import annotations

from meshwright.spec.frozen import Frozen


class Heartbeat(Frozen):
    """The newest mark of one rank; a rank that hangs writes no newer one."""

    rank: int
    """Its global rank."""
    num_ranks: int
    """Ranks of the run."""
    pid: int
    """Its process id on its host."""
    host: str
    """Its host."""
    started_ticks: int | None
    """When the process started, in the kernel's clock ticks, to distinguish it from a later one with the same
    id; None if unknown."""
    step: int
    """The optimizer step that it is in; 0 before the first."""
    phase: str
    """start, restore, data, `action 0F1` (the action of the pipeline's list), gradients, optimizer, agree, validation,
    checkpoint, finish, ended or failed."""
    waits_for_rank: int | None
    """The rank whose tensor it waits for, or that is to take one; None unless it waits in a pipeline's exchange."""
    time_s: float
    """When it said so, in seconds since 1970."""


LAST_PHASES = ("ended", "failed")
"""A rank with one of these phases has ended normally, or with an error that it reported."""
