"""Starts local ranks, again where that can help, and turns how they ended into one exit code."""

import os
import signal
from collections.abc import Callable, Collection, Sequence

from meshwright.errors import ExitCode, Preempted
from meshwright.fault_tolerance.launcher_watch import LauncherWatch
from meshwright.fault_tolerance.stop_request import StopSignals
from meshwright.hardware.machine import num_usable_cores
from meshwright.log import logger
from meshwright.spec.job.job import Job
from meshwright.spec.run.rank_records import EndedBySignal
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.launch.local_rank_group import LocalRankGroup, RankEnd, wait_for_ends
from meshwright.trainer.launch.rank import RankConfig
from meshwright.trainer.launch.restart_backoff import RestartBackoff, furthest_step
from meshwright.trainer.run.run_folder import ManifestFile, read_manifest
from meshwright.units import format_duration


def train_locally(config: RankConfig, num_ranks: int, after_attempt: Callable[[], None] = lambda: None) -> ExitCode:
    """Launch training, and again from the newest checkpoint after a lost rank, run.max_restarts times at most."""
    if config.job.replicas.independent:
        from meshwright.trainer.launch.replica_launch import train_replicas

        return train_replicas(config, num_ranks, after_attempt)
    run, section = config.run, config.job.run
    backoff = RestartBackoff(section.restart_backoff_s, furthest_step(run))
    with LauncherWatch(run, section) as watch, StopSignals() as stops:
        code = _attempt(config, num_ranks, watch, stops)
        after_attempt()
        for restart in range(1, section.max_restarts + 1):
            if code is not ExitCode.RETRY or _is_stopped(config):
                break
            delay_s = backoff.delay_s(furthest_step(run))
            when = f", in {format_duration(delay_s)}: the last ones reached no new step" if delay_s else ""
            logger.error("restart %d of %d from the newest checkpoint%s", restart, section.max_restarts, when)
            stops.sleep(delay_s)
            code = _attempt(config.replace(resume=True), num_ranks, watch, stops)
            after_attempt()
        return code


def _attempt(config: RankConfig, num_ranks: int, watch: LauncherWatch, stops: StopSignals) -> ExitCode:
    """Launch once, and let the manifest say how it ended where rank 0 was killed or knew less than another."""
    run = config.run
    before = read_manifest(run)
    try:
        code = launch(config, num_ranks, stops, watch.killed)
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


def launch(config: RankConfig, num_ranks: int, stops: StopSignals, killed: Collection[int] = ()) -> ExitCode:
    """Start `num_ranks` local ranks from `config` and return the exit code for all of them.

    `killed` grows by the process ids of ranks that have been reported and killed already. Signals of `stops` are passed
    on to the ranks, which stop after their step; raises KeyboardInterrupt or Preempted once they have.
    """
    raise_stop(stops, "no rank was running")
    threads = threads_of_rank(config.job, num_ranks)
    with LocalRankGroup.start(config, num_ranks, {"OMP_NUM_THREADS": str(threads)}, num_threads=threads) as group:
        while not group.poll():
            if wait_for_ends([group], [stops.descriptor]):
                for number in stops.take():
                    group.stop(number, config.job.run.grace_s)
    raise_stop(stops, "the ranks were asked to save and stop")
    failures = [end for end in group.ends if end.exit_code]
    report_failures([end for end in failures if end.pid not in killed], group.killed, config.run)
    return combined([end.exit_code for end in failures]) if failures else ExitCode.DONE


def raise_stop(stops: StopSignals, what: str) -> None:
    """Raise what a signal that asked this launcher to stop means, if there was one."""
    stops.take()
    if stops.first is signal.SIGINT:
        raise KeyboardInterrupt
    if stops.first is not None:
        raise Preempted(f"{stops.first.name}: {what}; continue with --resume")


def combined(codes: Collection[int]) -> ExitCode:
    """Return the code that says most: a rank that knows why it failed outweighs those that only lost it."""
    for code in (ExitCode.BAD_INPUT, ExitCode.DO_NOT_RETRY, ExitCode.INTERRUPTED):
        if code in codes:
            return code
    # A negative code is a signal: the rank was killed. Code 1 is Python failing before it could say more.
    return ExitCode.DO_NOT_RETRY if 1 in codes else ExitCode.RETRY


def report_failures(failures: Sequence[RankEnd], killed: Collection[int], run: Run) -> None:
    """Name the ranks that ended by themselves, the first in front of `failures`; those that we had to stop afterwards
    are no news, unless they did not.
    """
    signals: dict[int, str] = {}
    failed = {end.rank for end in failures}
    for end in sorted(failures, key=lambda end: end.rank):
        rank, code, log = end.rank, end.exit_code, run.rank_log(end.rank)
        if end.pid in killed:
            logger.error(
                "rank %d (pid %d) did not end after another, and was killed; %s", rank, end.pid, run.rank_log(rank)
            )
        elif code < 0 and (end is failures[0] or code != -signal.SIGTERM):
            signals[end.pid] = name = signal.Signals(-code).name
            logger.error("rank %d (pid %d) was killed by %s; its log: %s", rank, end.pid, name, log)
        elif code > 0 and rank > 0 and 0 not in failed:
            logger.error("rank %d ended with exit code %d: %s", rank, code, log)
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
