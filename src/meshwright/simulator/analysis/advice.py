"""suggestions(): what would hide a rank's exposed communication, as keys of a job or as changes to a program."""

from __future__ import annotations

from meshwright.simulator.analysis.overlap import FSDP_GATHER, FSDP_REDUCE
from meshwright.spec.step.overlap import Exposed, Overlap
from meshwright.spec.trace.marks import DDP_MARK
from meshwright.units import format_duration

_MOST = 3
_LEAST_GAIN = 0.002
"""Of the step: what saves less is not worth a line."""
_LEAST_PART = 0.1
"""Of the gain: what an earlier start or a later wait saves less of is not named."""


def suggestions(overlap: Overlap, step_s: float, *, is_job: bool) -> tuple[str, ...]:
    """Return the changes that would hide most of a rank's communication, most first; none that saves little."""
    worth = [(one, _change(one, is_job)) for one in overlap.exposed if one.gain_s >= _LEAST_GAIN * step_s]
    return tuple(f"rank {overlap.rank}: {_words(one)}: {change}" for one, change in worth if change)[:_MOST]


def _words(one: Exposed) -> str:
    place = ", ".join(part for part in (one.axis, one.phase, one.scope or "outside of modules") if part)
    return f"up to {format_duration(one.gain_s)} of {one.op} ({place}) could hide behind computation"


def _change(one: Exposed, is_job: bool) -> str:
    return ", ".join(one.keys) if is_job else _change_of_program(one)


def _change_of_program(one: Exposed) -> str:
    if one.scope.startswith(FSDP_GATHER):
        if one.phase == "backward":
            return "set_modules_to_backward_prefetch(), or fully_shard(..., reshard_after_forward=False)"
        return "set_modules_to_forward_prefetch()"
    if one.scope.startswith(FSDP_REDUCE):
        if "allreduce" in one.op:
            return "more tokens in each backward"
        return "more tokens in each backward, or fully_shard() over fewer ranks (a mesh with a replicated dimension)"
    if one.scope.startswith(DDP_MARK):
        return "more tokens in each backward, or a smaller bucket_cap_mb"
    if one.axis.startswith("pp"):
        return "more microbatches, or another schedule"
    return _how_to_begin_async(one) + " and ".join(_changes_of_order(one))


def _how_to_begin_async(one: Exposed) -> str:
    """Return the call that does not wait for its own end; "" where the program makes it already."""
    if one.is_async or not one.op.startswith("c10d."):
        return ""
    return "with isend() or irecv(), " if _is_message(one) else "with async_op=True, "


def _changes_of_order(one: Exposed) -> list[str]:
    least_s = _LEAST_PART * one.gain_s
    ready = "its buffer is free" if one.op.startswith("c10d.recv") else "its input is written"
    earlier = [f"start it as soon as {ready}"] if one.earlier_s > least_s else []
    later = ["call wait() where its result is first used"] if one.later_s > least_s else []
    return earlier + later


def _is_message(one: Exposed) -> bool:
    return one.op.startswith(("c10d.send", "c10d.recv"))
