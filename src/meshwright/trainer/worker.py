"""One rank from its start to its exit code: what `meshwright train` does under torch elastic or torchrun."""

from __future__ import annotations

import errno
import logging
import os
import sys

import torch

from meshwright.errors import ConfigError, ExitCode, LostPeer, MeshwrightError
from meshwright.fault_tolerance.lost_peer import is_lost_peer
from meshwright.fault_tolerance.stop_request import die_with_parent
from meshwright.log import logger
from meshwright.parallelism.torch_compat import silence_known_warnings
from meshwright.spec.job import Job
from meshwright.spec.run import Run
from meshwright.trainer.loop import train
from meshwright.trainer.open_run import claim
from meshwright.trainer.ranks import Ranks

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def train_as_rank(job: Job, run: Run, *, resume: bool, overwrite: bool) -> ExitCode:
    """Join the other ranks, train, and return the exit code; raises LostPeer when one of them is gone."""
    die_with_parent()
    # The copy of the job in the run folder can then be resumed from anywhere.
    job = job.replace(run=job.run.replace(dir=str(run.folder)))
    silence_known_warnings()
    if job.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    with Ranks.join(job.run) as ranks:
        try:
            _claim_together(ranks, job, run, resume=resume, overwrite=overwrite)
            if not ranks.is_first:
                _redirect_output(run, ranks.rank)
            return train(job, run, ranks, resume=resume)
        except RuntimeError as error:
            if is_lost_peer(error):
                raise LostPeer(
                    f"rank {ranks.rank} of {ranks.num_ranks} lost another rank: {_first_line(error)}: "
                    "start again with --resume; what each rank said last is in its log in "
                    f"{run.logs}"
                ) from error
            raise
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            raise MeshwrightError(
                f"rank {ranks.rank} could not read or write {error.filename or run.folder}: {error.strerror}: "
                "what was committed is untouched: make room or mend the disk, then start again with --resume"
            ) from error


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


def _redirect_output(run: Run, rank: int) -> None:
    """Send what this rank prints to its own log file; rank 0 keeps the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        log = os.open(run.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write {run.rank_log(rank)}: {error.strerror}: set run.dir to a shared folder"
        ) from error
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    logger.info("rank %d, pid %d", rank, os.getpid())


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
