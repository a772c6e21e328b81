"""One rank from its start to its exit code: what `meshwright train` does under torch elastic or torchrun."""

from __future__ import annotations

import errno
import os

import torch

from meshwright.config.paths import with_absolute_paths
from meshwright.errors import ExitCode, LostPeer, MeshwrightError
from meshwright.fault_tolerance.hang_watch import show_stacks_on_signal
from meshwright.fault_tolerance.lost_peer import is_lost_peer, words_of
from meshwright.fault_tolerance.stop_request import die_with_parent, ignore_stops
from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings
from meshwright.parallelism.torch_private.torch_flight_recorder import keep_more_collectives
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.spec.step.estimate import Estimate
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.launch.user_code import blame_job_code
from meshwright.trainer.run.loop import train
from meshwright.trainer.run.open_run import claim
from meshwright.trainer.run.terminal import Terminal

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def train_as_rank(job: Job, run: Run, *, resume: bool, overwrite: bool, estimate: Estimate | None = None) -> ExitCode:
    """Join the other ranks, train, and return the exit code; raises LostPeer when one of them is gone.

    `estimate` is what the planner expects, where it chose the layout.
    """
    die_with_parent()
    # The copy of the job in the run folder can then be resumed from anywhere.
    job = with_absolute_paths(job.replace(run=job.run.replace(dir=str(run.folder))))
    silence_known_warnings()
    if job.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    keep_more_collectives()
    with Ranks.join(job.run) as ranks:
        try:
            with Terminal(ranks, run) as terminal:
                _claim_together(ranks, job, run, resume=resume, overwrite=overwrite)
                terminal.leave_to_rank_0()
                show_stacks_on_signal(run.stack(ranks.rank))
                code = train(job, run, ranks, resume=resume, estimate=estimate)
                ignore_stops()
                return code
        except MeshwrightError:
            raise
        except Exception as error:
            explained = _explain(error, job, run, ranks)
            if explained is None:
                raise
            raise explained from error


def _explain(error: Exception, job: Job, run: Run, ranks: Ranks) -> MeshwrightError | None:
    """Return the message to show for `error`, None where it is a bug of ours."""
    if is_lost_peer(error):
        return LostPeer(
            f"rank {ranks.rank} of {ranks.num_ranks} lost another rank: {words_of(error)}: "
            f"start again with --resume; what each rank said last is in its log in {run.logs}"
        )
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return MeshwrightError(
            f"rank {ranks.rank} could not read or write {error.filename or run.folder}: {error.strerror}: "
            "what was committed is untouched: make room or repair the disk, then start again with --resume"
        )
    return blame_job_code(job, error)


def _claim_together(ranks: Ranks, job: Job, run: Run, *, resume: bool, overwrite: bool) -> None:
    """Let rank 0 claim the folder and every rank stop if it may not: none waits for one that has left."""
    problem: MeshwrightError | None = None
    if ranks.is_first:
        try:
            claim(run, job, resume=resume, overwrite=overwrite)
        except MeshwrightError as error:
            problem = error
    problem = ranks.gather(problem)[0]
    if problem is not None:
        raise problem
