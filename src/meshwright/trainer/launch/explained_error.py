"""explained_error(): what a rank says of an error: a lost peer, a disk, or the job's own code; the rest is a bug."""

from __future__ import annotations

import errno
import multiprocessing
import sysconfig
import traceback
from pathlib import Path
from typing import TypeGuard

from meshwright.data.job_code import job_code_error
from meshwright.errors import LostPeer, MeshwrightError
from meshwright.fault_tolerance.lost_peer import is_lost_peer, words_of
from meshwright.fault_tolerance.vanished_ranks import vanished_text
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.ranks import Ranks

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def explained_error(error: Exception, job: Job, run: Run, ranks: Ranks) -> MeshwrightError | None:
    """Return the message to show for `error`, None where it is a bug of ours."""
    if is_lost_peer(error):
        # Our own launcher names it.
        vanished = "" if _is_forked() else vanished_text(run)
        return LostPeer(
            f"rank {ranks.rank} of {ranks.num_ranks} lost another rank: {words_of(error)}: "
            f"{vanished and f'{vanished}: '}{_what_next(job)}; what each rank said last is in its log in {run.logs}"
        )
    blamed = blame_job_code(job, error)
    if blamed is None and _is_of_disk(error):
        return MeshwrightError(
            f"rank {ranks.rank} could not read or write {error.filename or _place_of_write(error, run)}: "
            f"{error.strerror}: what was committed is untouched: make room or repair the disk, then start again with "
            "--resume"
        )
    return blamed


def _is_of_disk(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def _place_of_write(error: OSError, run: Run) -> str:
    """Return where a file that the system does not name was written: by us in the run folder, else a line of code."""
    libraries, ours = sysconfig.get_paths(), Path(__file__).parents[2]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(libraries["purelib"])
        or not Path(frame.filename).is_relative_to(libraries["stdlib"])
    ]
    if not frames or Path(frames[-1].filename).is_relative_to(ours):
        return str(run.folder)
    last = frames[-1]
    return f"a file, at {last.filename}:{last.lineno} in {last.name}"


def _is_forked() -> bool:
    """Return whether our own launcher has started this rank."""
    return multiprocessing.parent_process() is not None


def _what_next(job: Job) -> str:
    """Return what to do about a lost rank: nothing where our launcher, which has forked this one, restarts them."""
    if job.run.max_restarts and _is_forked():
        return f"the launcher starts all ranks again unless run.max_restarts = {job.run.max_restarts} is used up"
    return "start again with --resume"


_CHANGED = "modified by an inplace operation"
"""In the message of torch's autograd (2.11 to 2.13)."""


def blame_job_code(job: Job, error: Exception) -> MeshwrightError | None:
    """Return what `job_code_error` does, or of an error of autograd about tensors that a model changed, what to do."""
    if is_object_source(job.model.source) and _CHANGED in str(error):
        tensor = str(error).partition(_CHANGED)[2].split(":", 2)[1].partition(", which is")[0].strip()
        return MeshwrightError(
            f"model.source = {job.model.source!r}: a tensor that its forward saved for backward, {tensor}, was changed "
            "in place afterwards, so that no gradient can be computed: write to a new tensor in the model, then start "
            "again with --resume"
        )
    remedy = "make room or repair the disk" if _is_of_disk(error) else "correct it"
    return job_code_error(job, error, f"{remedy}, then start again with --resume")
