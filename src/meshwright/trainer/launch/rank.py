"""python -m meshwright.trainer.launch.rank FILE: a rank of `meshwright train`, which wrote its RankConfig to FILE."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from pydantic import Field

from meshwright.errors import ExitCode, Preempted
from meshwright.exits import exit_code_of, leave
from meshwright.garbage import kept_garbage
from meshwright.log import LogLevel, set_log_level
from meshwright.spec.fault import Faults
from meshwright.spec.frozen import Frozen
from meshwright.spec.job.job import Job
from meshwright.spec.machine.allocator_settings import set_allocator
from meshwright.spec.run.run import Run
from meshwright.spec.step.estimate import Estimate


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
    faults: Faults | None = Field(None, strict=False)
    """What befalls a chaos run, whose ranks keep a ledger of their steps; None for any other."""

    @property
    def run(self) -> Run:
        """Return the run folder."""
        return Run(Path(self.run_dir))


def main() -> None:
    """Train as the rank that the environment names (RANK, WORLD_SIZE, LOCAL_RANK) and exit with its code."""
    preempt_on_sigterm()
    leave(exit_code_of(lambda: train_rank(RankConfig.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))))


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


def preempt_on_sigterm() -> None:
    """Let SIGTERM raise Preempted until training handles it."""
    signal.signal(signal.SIGTERM, _preempt)


def _preempt(number: int, frame: FrameType | None) -> None:
    raise Preempted("SIGTERM before training began: nothing was changed")


if __name__ == "__main__":
    main()
