"""Diagnosis: why a run stands still, which ranks are to blame, and what the others wait in."""

from __future__ import annotations

from typing import Literal

from meshwright.spec.frozen import Frozen

Verdict = Literal["ended", "moving", "died", "failed", "stopped", "departed", "mismatch", "busy", "network", "unknown"]
"""ended: all ranks exited normally. moving: it is slow, not stuck. died: a rank's process is gone. failed: a rank
ended with an error. stopped: a process is suspended. departed, mismatch: ranks ask for different collectives. busy: a
rank is elsewhere, in data, a checkpoint or a module. network: every rank waits for one collective. unknown: the files
do not say."""

ProcessState = Literal["running", "stopped", "gone", "elsewhere"]
"""elsewhere: on another host, or on a system without process information."""


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
