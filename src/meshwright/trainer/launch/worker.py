"""One rank from its start to its exit code: what `meshwright train` does in a forked process or under torchrun."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from meshwright.config.paths import with_absolute_paths
from meshwright.data import user_data
from meshwright.data.streams import sample_stream
from meshwright.errors import ConfigError, ExitCode, LostPeer, MeshwrightError
from meshwright.fault_tolerance.hangs.hang_watch import show_stacks_on_signal
from meshwright.fault_tolerance.lost_peer import is_lost_peer, words_of
from meshwright.fault_tolerance.rank_terminal import keep_terminal
from meshwright.fault_tolerance.stop_request import die_with_parent, ignore_stops
from meshwright.fault_tolerance.vanished_ranks import vanished_text
from meshwright.log import logger
from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings
from meshwright.parallelism.torch_private.torch_flight_recorder import keep_more_collectives
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source, place_of
from meshwright.spec.run.run import Run
from meshwright.trainer.cluster.first_look import warn_of_nodes
from meshwright.trainer.launch.host_process import prepare_host_process
from meshwright.trainer.launch.ranks import Ranks, choose_device_type
from meshwright.trainer.run.loop import train
from meshwright.trainer.run.open_run import claim

if TYPE_CHECKING:
    from meshwright.trainer.launch.rank import RankConfig

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def train_as_rank(config: RankConfig) -> ExitCode:
    """Join the other ranks, train, and return the exit code; raises LostPeer when one of them is gone."""
    die_with_parent()
    run = config.run
    # The copy of the job in the run folder can then be resumed from anywhere.
    job = with_absolute_paths(config.job.replace(run=config.job.run.replace(dir=str(run.folder))))
    silence_known_warnings()
    if job.train.exact_elastic and "OMP_NUM_THREADS" not in os.environ:
        # `meshwright train` sets it, torchrun does for several ranks only.
        torch.set_num_threads(1)
    if job.run.deterministic or (job.train.exact_elastic and choose_device_type(job.run) == "cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    keep_more_collectives()
    with Ranks.join(job.run, is_replica=config.replica is not None) as ranks:
        if ranks.device.type == "cpu":
            prepare_host_process(os.environ)
        try:
            own = run if config.replica is None else run.of_replica(config.replica.replica)
            with Terminal(ranks, own) as terminal:
                if config.replica is None:
                    _claim_together(ranks, job, run, resume=config.resume, overwrite=config.overwrite)
                warn_of_nodes(ranks)
                terminal.leave_to_rank_0()
                show_stacks_on_signal(own.stack(ranks.rank))
                with explained_exit():
                    code = train(config.replace(job=job), ranks)
                ignore_stops()
                return code
        except MeshwrightError:
            raise
        except Exception as error:
            explained = _explain(error, job, run, ranks)
            if explained is None:
                raise
            raise explained from error


@contextmanager
def explained_exit() -> Iterator[None]:
    """Raise MeshwrightError for a SystemExit of code that the job names, which would end the run as if it were done."""
    try:
        yield
    except SystemExit as ending:
        raise MeshwrightError(
            f"the job's own code ended the run by {place_of(ending)}: let it raise an error, or return, then start "
            "again with --resume"
        ) from ending


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


class Terminal:
    """Redirection of a rank's output to its log; the first rank that fails gets the terminal's stderr back.

    Ranks that fail later have mostly lost that peer, and would print misleading advice.
    """

    def __init__(self, ranks: Ranks, run: Run) -> None:
        self._ranks, self._run = ranks, run
        self._owns_terminal = True

    def __enter__(self) -> Self:
        self._stderr = os.dup(2)
        return self

    def leave_to_rank_0(self) -> None:
        """Redirect the output of this rank to its log, unless it is rank 0."""
        if self._ranks.is_first:
            return
        try:
            self._redirect((1, 2))
            self._owns_terminal = False
            keep_terminal(self._stderr)
        except OSError as error:
            log = self._run.rank_log(self._ranks.rank)
            raise ConfigError(f"cannot write {log}: {error.strerror}: set run.dir to a shared folder") from error
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
        logger.info("rank %d, pid %d", self._ranks.rank, os.getpid())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            if self._ranks.fails_first():
                self._print_error(error)
            else:
                self._silence()
        keep_terminal(None)
        os.close(self._stderr)

    def _print_error(self, error: Exception) -> None:
        if self._owns_terminal:
            return
        traceback.print_exception(error)
        sys.stderr.flush()
        os.dup2(self._stderr, 2)
        if not isinstance(error, MeshwrightError):
            print(f"rank {self._ranks.rank} of {self._ranks.num_ranks}:", file=sys.stderr, flush=True)

    def _silence(self) -> None:
        try:
            self._redirect((2,))
        except OSError:
            # No log: the run folder was rejected.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    def _redirect(self, descriptors: tuple[int, ...]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(self._run.rank_log(self._ranks.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in descriptors:
            os.dup2(log, descriptor)
        os.close(log)


def _explain(error: Exception, job: Job, run: Run, ranks: Ranks) -> MeshwrightError | None:
    """Return the message to show for `error`, None where it is a bug of ours."""
    if is_lost_peer(error):
        # Our own launcher names it.
        vanished = "" if _is_forked() else vanished_text(run)
        return LostPeer(
            f"rank {ranks.rank} of {ranks.num_ranks} lost another rank: {words_of(error)}: "
            f"{vanished and f'{vanished}: '}{_what_next(job)}; what each rank said last is in its log in {run.logs}"
        )
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return MeshwrightError(
            f"rank {ranks.rank} could not read or write {error.filename or run.folder}: {error.strerror}: "
            "what was committed is untouched: make room or repair the disk, then start again with --resume"
        )
    return blame_job_code(job, error)


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
    """Return the one line that says where the job's own code raised `error`, having shown its traceback on stderr.

    None where the error did not pass through the modules that model.source and data.source name, and is not one of
    autograd about tensors that a model changed.
    """
    if is_object_source(job.model.source) and _CHANGED in str(error):
        tensor = str(error).partition(_CHANGED)[2].split(":", 2)[1].partition(", which is")[0].strip()
        return MeshwrightError(
            f"model.source = {job.model.source!r}: a tensor that its forward saved for backward, {tensor}, was changed "
            "in place afterwards, so that no gradient can be computed: write to a new tensor in the model, then start "
            "again with --resume"
        )
    keys = [("model.source", job.model.source), ("data.source", job.data.source)]
    # Both may be in one file.
    for key, source in reversed(keys) if _passes_data(error.__traceback__) else keys:
        start = _first_frame_in(source, error.__traceback__)
        if start is not None:
            traceback.print_exception(type(error), error, start)
            place = traceback.extract_tb(start)[0]
            return MeshwrightError(
                f"{key} = {source!r}: {type(error).__name__} came out of the job's own code, {place.filename}:"
                f"{place.lineno} in {place.name}, shown above: correct it, then start again with --resume"
            )
    return None


def _passes_data(trace: TracebackType | None) -> bool:
    """Return whether an error came through the code that reads samples."""
    readers = (user_data.__file__, sample_stream.__file__)
    return any(frame.f_code.co_filename in readers for frame, _ in traceback.walk_tb(trace))


def _first_frame_in(source: str, trace: TracebackType | None) -> TracebackType | None:
    if not is_object_source(source):
        return None
    file = getattr(sys.modules.get(source.partition(":")[0]), "__file__", None)
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return trace
