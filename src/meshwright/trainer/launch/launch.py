"""Starts one process per local rank through torch elastic and turns how they ended into one exit code."""

import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.errors import ExitCode, Preempted
from meshwright.fault_tolerance.launcher_watch import LauncherWatch
from meshwright.fault_tolerance.stop_request import ignores_hangup
from meshwright.hardware.machine import num_usable_cores
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.run.rank_records import EndedBySignal
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.run.run_folder import ManifestFile, read_manifest


def train_locally(config: RankConfig, num_ranks: int, after_attempt: Callable[[], None] = lambda: None) -> ExitCode:
    """Launch training, and again from the newest checkpoint after a lost rank, run.max_restarts times at most."""
    with LauncherWatch(config.run, config.job.run) as watch:
        code = _attempt(config, num_ranks, watch)
        after_attempt()
        for restart in range(1, config.job.run.max_restarts + 1):
            if code is not ExitCode.RETRY or _is_stopped(config):
                break
            logger.error("restart %d of %d from the newest checkpoint", restart, config.job.run.max_restarts)
            code = _attempt(config.replace(resume=True), num_ranks, watch)
            after_attempt()
        return code


def _attempt(config: RankConfig, num_ranks: int, watch: LauncherWatch) -> ExitCode:
    """Launch once, and let the manifest say how it ended where rank 0 was killed or knew less than another."""
    run = config.run
    before = read_manifest(run)
    try:
        code = launch(config, num_ranks, watch.killed)
    except (Preempted, KeyboardInterrupt):
        ended = _began(before, run)
        if ended is None or ended.exit != ExitCode.DONE:
            raise
        logger.warning("asked to stop after the last step: the run is complete")
        return ExitCode.DONE
    ended = _began(before, run)
    if ended is not None and ended.exit != code:
        ManifestFile(run, ended).close(code)
    return code


def _began(before: Manifest | None, run: Run) -> Manifest | None:
    """Return the manifest with the attempt that the ranks began since `before`; None where they ended before that."""
    after = read_manifest(run)
    has_begun = after is not None and len(after.attempts) > (len(before.attempts) if before else 0)
    return after if has_begun else None


def _is_stopped(config: RankConfig) -> bool:
    """Return whether the run is where train.stop_after wants it."""
    stop_after = config.job.train.stop_after
    return stop_after is not None and stop_after <= max(config.run.checkpoint_steps(), default=0)


def launch(config: RankConfig, num_ranks: int, killed: Collection[int] = ()) -> ExitCode:
    """Start `num_ranks` local ranks from `config` and return the exit code for all of them.

    `killed` grows by the process ids of ranks that have been reported and killed already.

    A SIGTERM, SIGHUP or SIGINT that reaches this process is passed on to the ranks, which stop after their step.
    """
    _keep_elastic_quiet(config.job.run.grace_s)
    _share_cores(config.job, num_ranks)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        config_file = Path(folder) / "rank.json"
        config_file.write_text(config.to_json(), encoding="utf-8")
        elastic = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            # Without it the host's full name is looked up, which a laptop's network may not answer.
            local_addr="localhost",
            # A restart by elastic would keep its store and with it the dead ranks' addresses; we start again.
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        if ignores_hangup():
            # Elastic would handle the signal all the same, and end what nohup was to protect.
            elastic.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
        try:
            elastic_launch(elastic, sys.executable)("-m", RankConfig.__module__, str(config_file))
        except ChildFailedError as error:
            _report({rank: one for rank, one in error.failures.items() if one.pid not in killed}, config.run)
            return _combine([failure.exitcode for failure in error.failures.values()])
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from stopped
            name = stopped.sigval.name
            raise Preempted(f"{name}: the ranks were asked to save and stop; continue with --resume") from stopped
    return ExitCode.DONE


def _combine(codes: Collection[int]) -> ExitCode:
    """Return the code that says most: a rank that knows why it failed outweighs those that only lost it."""
    for code in (ExitCode.BAD_INPUT, ExitCode.DO_NOT_RETRY, ExitCode.INTERRUPTED):
        if code in codes:
            return code
    # A negative code is a signal: the rank was killed. Code 1 is Python failing before it could say more.
    return ExitCode.DO_NOT_RETRY if 1 in codes else ExitCode.RETRY


def _report(failures: dict[int, ProcessFailure], run: Run) -> None:
    """Name the ranks that ended by themselves; those that we had to stop afterwards are no news."""
    first = min(failures.values(), key=lambda failure: failure.timestamp, default=None)
    signals: dict[int, str] = {}
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and (failure is first or failure.exitcode != -signal.SIGTERM):
            signals[failure.pid] = name = signal.Signals(-failure.exitcode).name
            logger.error("rank %d (pid %d) was killed by %s; its log: %s", rank, failure.pid, name, run.rank_log(rank))
        elif failure.exitcode > 0 and rank > 0 and 0 not in failures:
            logger.error("rank %d ended with exit code %d: %s", rank, failure.exitcode, run.rank_log(rank))
    if signals and run.hangs.is_dir():
        run.ended_by_signal.write_text(EndedBySignal(by_pid=signals).to_json(), encoding="utf-8")


def threads_of_rank(job: Job, num_ranks: int) -> int:
    """Return a local rank's threads: OMP_NUM_THREADS, or its share of the cores; more make every rank slower.

    One where sums are exact (train.exact_elastic): with other numbers of threads matmuls have other bits.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit():
        return int(given)
    return 1 if job.train.exact_elastic else max(1, num_usable_cores() // num_ranks)


def _share_cores(job: Job, num_ranks: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_rank(job, num_ranks)))
    # Threads that spin while they wait make a step several times slower as soon as anything else runs
    # (2 cores, two busy neighbours, 2026-11-20: median step 976 ms spinning, 480 ms passive).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _keep_elastic_quiet(grace_s: float) -> None:
    # The launcher says itself which rank ended how. Elastic gives each of its modules a logger with its own level.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # After SIGTERM; torch's own default of 30 s is short for a large model.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(grace_s)))
