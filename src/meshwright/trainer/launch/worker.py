"""One rank from its start to its exit code: what `meshwright train` does in a forked process or under torchrun."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from meshwright.config.paths import with_absolute_paths
from meshwright.errors import ConfigError, ExitCode, MeshwrightError
from meshwright.fault_tolerance.hangs.hang_watch import show_stacks_on_signal
from meshwright.fault_tolerance.rank_terminal import keep_terminal
from meshwright.fault_tolerance.stop_request import die_with_parent, ignore_stops
from meshwright.log import logger
from meshwright.parallelism.torch_private.torch_compat import silence_known_warnings
from meshwright.parallelism.torch_private.torch_flight_recorder import keep_more_collectives
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import place_of
from meshwright.spec.run.run import Run
from meshwright.trainer.cluster.first_look import warn_of_nodes
from meshwright.trainer.launch.explained_error import explained_error
from meshwright.trainer.launch.host_process import prepare_host_process
from meshwright.trainer.launch.ranks import Ranks, choose_device_type
from meshwright.trainer.run.loop import train
from meshwright.trainer.run.open_run import claim

if TYPE_CHECKING:
    from meshwright.trainer.launch.rank import RankConfig


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
            explained = explained_error(error, job, run, ranks)
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
        with suppress(OSError):  # its log is on the full disk that it failed of
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
