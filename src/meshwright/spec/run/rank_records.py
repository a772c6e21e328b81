"""What one rank writes of where it is, at every mark and when it hangs, and Diagnosis: why a run stands still."""

from typing import Literal

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
    started_ticks: int | None
    """When the process started, in the kernel's clock ticks, to distinguish it from a later one with the same
    id; None if unknown."""
    step: int
    """The optimizer step that it is in; 0 before the first."""
    phase: str
    """start, restore, data, `action 0F1` (the action of the pipeline's list), gradients, optimizer, sync, record,
    agree, validation, checkpoint, finish, ended or failed."""
    waits_for_rank: int | None
    """The rank whose tensor it waits for, or that is to take one; None unless it waits in a pipeline's exchange."""
    time_s: float
    """When it said so, in seconds since 1970."""
    launcher_pid: int | None = None
    """The process id of our own launcher, which had it started; None under torchrun."""


LAST_PHASES = ("ended", "failed")
"""A rank with one of these phases has ended normally, or with an error that it reported."""


class ProcessGroupRecord(Frozen):
    """A process group that this rank is part of."""

    name: str
    """Its name in torch, the same on each of its ranks."""
    axis: str
    """The mesh axis that it serves, such as tp; `world` for all ranks, else torch's own word."""
    ranks: list[int]
    """Its global ranks."""


class Collective(Frozen):
    """One collective that a rank has entered, or that comes next in its order."""

    group: str
    """The name of the process group."""
    sequence: int
    """Its number among the collectives of the group, from 1; 0 for one that was not asked for yet."""
    op: str
    """What it does, such as all_reduce."""
    sizes: list[list[int]]
    """The shapes of its inputs on this rank."""
    is_done: bool = False
    """Whether it was complete on this rank."""
    step: int | None = None
    """The optimizer step that entered it; None for one of an earlier step or of the start."""
    phase: str | None = None
    """The heartbeat's phase in which it was entered."""
    module: str | None = None
    """The module that was the last to be entered before it, in forward or backward; None where that is unknown."""


class Departure(Frozen):
    """Where a step asked for another collective than an earlier step did in the same place."""

    found: Collective
    """What it asked for."""
    known: Collective | None
    """What the earlier step had asked for; None where that had no more."""
    is_skip: bool = False
    """Whether the earlier step asked for what was found later on: the rank skipped `known`."""


class Frame(Frozen):
    """One call in a Python stack."""

    file: str
    line: int
    function: str
    module: str | None = None
    """The module of the model that the call belongs to."""


class FlightRecord(Frozen):
    """One rank's answer to where it is."""

    rank: int
    """Its global rank."""
    pid: int
    reason: str
    time_s: float
    """When, in seconds since 1970."""
    groups: list[ProcessGroupRecord]
    """The process groups that this rank is part of."""
    collectives: list[Collective]
    """The newest that it has entered, oldest first."""
    expected: Collective | None = None
    """What the order of an earlier step says that it asks for next; None where there is none to go by."""
    departure: Departure | None = None
    """Where this step left the order of an earlier one; None where it did not, or where no order is known."""
    stack: list[Frame]
    """The loop's thread, the outermost call first."""
    error: str | None = None
    """The error that ended this rank, in a line."""
    is_lost_peer: bool = False
    """Whether that error is a timeout, or a lost connection to another rank: the cause is elsewhere."""
    waited_s: float | None = None
    """Seconds from the loop's last mark to that error; None without one."""


Verdict = Literal["ended", "moving", "died", "failed", "stopped", "departed", "mismatch", "busy", "network", "unknown"]
"""ended: all ranks exited normally. moving: it is slow, not stuck. died: a rank's process is gone. failed: a rank
ended with an error. stopped: a process is suspended. departed, mismatch: ranks ask for different collectives. busy: a
rank is elsewhere, in data, a checkpoint or a module. network: every rank waits for one collective. unknown: the files
do not say."""

ProcessState = Literal["running", "stopped", "gone", "elsewhere"]
"""elsewhere: on another host, or on a system without process information."""


class EndedBySignal(Frozen):
    """The ranks that a signal ended, as only their launcher learns."""

    by_pid: dict[int, str]
    """The signal's name, such as SIGABRT, by process id; not of ranks that were ended since another had failed."""


class RankState(Frozen):
    """One rank, as its files and its process show it."""

    rank: int
    """Its global rank."""
    process: ProcessState
    """What has become of its process."""
    silent_s: float
    """Seconds since its loop's last mark."""
    step: int
    """The optimizer step that it is in."""
    phase: str
    """What its loop does, as in a heartbeat."""
    doing: str
    """The collective that it waits in, or the line of code that it is at."""
    waits_for: list[int]
    """The ranks that it waits for."""


class Diagnosis(Frozen):
    """What is known of a run that stands still."""

    verdict: Verdict
    """What kind of trouble it is."""
    culprits: list[int]
    """The ranks to look at; empty where none is to blame."""
    headline: str
    """The finding in a sentence."""
    collective: str | None = None
    """The collective that is not reached, or not the same on all ranks: what, of which group, the how manieth."""
    module: str | None = None
    """The module that the collective belongs to."""
    evidence: list[str]
    """What the finding rests on, a sentence each."""
    advice: str
    ranks: list[RankState]
    """Every rank of the run."""
    may_pass: bool = False
    """Whether the error of a verdict of `failed` is one that another attempt may not get."""
