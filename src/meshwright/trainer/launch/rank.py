"""A rank of a run: what it starts from, and what its process does from the fork to its exit code."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pydantic import Field

from meshwright.errors import ExitCode, Preempted
from meshwright.exits import exit_code_of, leave
from meshwright.fault_tolerance.orphaned_rank import outlive_launcher
from meshwright.garbage import kept_garbage
from meshwright.log import LogLevel, set_log_level
from meshwright.spec.fault import Faults
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.job import Job
from meshwright.spec.machine.allocator_settings import set_allocator
from meshwright.spec.run.quorum import ReplicaPlace
from meshwright.spec.run.run import Run
from meshwright.spec.step.estimate import Estimate
from meshwright.trainer.launch.local.rank_fork_server import (
    SentDescriptor,
    accept_signals,
    caller_has_ended,
    wait_for_caller,
)
from meshwright.trainer.launch.local.store_file import variables_of_store


class RankConfig(Frozen):
    """What every rank of a run starts from."""

    job: Job
    """The resolved job: its layout leaves nothing open."""
    run_dir: str
    """The run folder, relative to the working directory."""
    module_dir: str
    """The job file's folder, where modules that the job names may be."""
    resume: bool = False
    overwrite: bool = False
    estimate: Estimate | None = None
    """What the planner expects, where it chose the layout."""
    log_level: LogLevel = "INFO"
    """Least level of what rank 0 prints."""
    replica: ReplicaPlace | None = None
    """The independent replica that this rank is part of; None where all ranks share one process group."""
    warms_up: bool = False
    """Whether the replica is to join others that train already."""
    faults: Faults | None = Field(None, strict=False)
    """What befalls a chaos run, whose ranks keep a ledger of their steps; None for any other."""

    @property
    def own_run(self) -> Run:
        """Return the folder of this rank's heartbeats: the run's, or its independent replica's."""
        return self.run if self.replica is None else self.run.of_replica(self.replica.replica)

    @property
    def run(self) -> Run:
        """Return the run folder."""
        return Run(Path(self.run_dir))


@dataclass(frozen=True)
class RankStart:
    """What the launcher sends to a process that is forked as a rank."""

    config: str
    """The RankConfig as JSON."""
    environment: dict[str, str]
    """All variables of the process, those that name its rank included."""
    num_threads: int
    grace_s: float
    """Seconds that it may still write a checkpoint when its launcher has died."""
    ignores_hangup: bool
    stdout: SentDescriptor
    stderr: SentDescriptor
    store: SentDescriptor
    """The file by which the ranks find each other."""


def rank_process(start: RankStart) -> None:
    """Train as the rank that `start` names, and end this forked process with its exit code."""
    # As its own session, it gets signals from the launcher only, not from the terminal.
    os.setsid()
    start.stdout.replace(1)
    start.stderr.replace(2)
    os.environ.clear()
    os.environ.update(start.environment | variables_of_store(start.store.number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN if start.ignores_hangup else signal.SIG_DFL)
    preempt_on_sigterm()
    threading.Thread(target=_end_with_launcher, args=(start,), name="end_with_launcher", daemon=True).start()
    code = exit_code_of(lambda: _train(start))
    if caller_has_ended():
        _end_group()
    leave(code)


def _train(start: RankStart) -> ExitCode:
    accept_signals()
    # Forked, it has the number of its server.
    import torch

    torch.set_num_threads(start.num_threads)
    return train_rank(RankConfig.from_json(start.config))


def _end_with_launcher(start: RankStart) -> None:
    """Save and stop when the launcher has died, as after SIGTERM, and end in any case soon, hung or not."""
    wait_for_caller()
    os.kill(os.getpid(), signal.SIGTERM)
    config = RankConfig.from_json(start.config)
    outlive_launcher(config.run, config.own_run, start.grace_s)
    _end_group()


def _end_group() -> None:
    """End this process and all that it has started, for a launcher that is gone and would have; none reads a code."""
    os.killpg(0, signal.SIGKILL)


def train_rank(config: RankConfig) -> ExitCode:
    """Train as the rank that the environment names and return the exit code; raises LostPeer when another is gone."""
    sys.path.insert(0, config.module_dir)
    set_log_level(config.log_level)
    # Before torch is imported, which may read its settings then.
    set_allocator(os.environ)
    with kept_garbage():
        from meshwright.fault_tolerance.torchrun_agent import end_cut_off_agent
        from meshwright.trainer.launch.worker import train_as_rank

    try:
        return train_as_rank(config)
    except Exception:
        end_cut_off_agent()
        raise


_has_begun = threading.Event()


def preempt_on_sigterm() -> None:
    """Let SIGTERM raise Preempted until training handles it; after training it does nothing."""
    _has_begun.clear()
    signal.signal(signal.SIGTERM, _preempt)


def note_training_began() -> None:
    """Say that training handles signals by now: one that comes after its end changes no exit code."""
    _has_begun.set()


def _preempt(number: int, frame: FrameType | None) -> None:
    if not _has_begun.is_set():
        raise Preempted("SIGTERM before training began: nothing was changed")
