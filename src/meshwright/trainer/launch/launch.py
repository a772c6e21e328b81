"""Starts local ranks, again where that can help, and turns how they ended into one exit code."""

import logging
import math
import time
from collections.abc import Callable

from meshwright.errors import ExitCode, Preempted
from meshwright.fault_tolerance.hangs.launcher_watch import LauncherWatch
from meshwright.fault_tolerance.stop_request import StopSignals
from meshwright.log import logger
from meshwright.spec.run.run import Manifest, Run
from meshwright.trainer.launch.local.local_rank_group import LocalRankGroup, threads_of_rank, wait_for_ends
from meshwright.trainer.launch.local.rank_ends import code_of, raise_stop, report_failures
from meshwright.trainer.launch.local.restart_backoff import RestartBackoff, furthest_step
from meshwright.trainer.launch.rank import RankConfig, note_training_began
from meshwright.trainer.launch.replicas.replica_launch import train_replicas
from meshwright.trainer.run.run_folder import ManifestFile, read_manifest
from meshwright.units import format_duration


def train_locally(config: RankConfig, num_ranks: int, after_attempt: Callable[[], None] = lambda: None) -> ExitCode:
    """Launch training, and again from the newest checkpoint after a lost rank, run.max_restarts times at most."""
    if config.job.replicas.independent:
        return _train_replicas(config, num_ranks, after_attempt)
    run, section = config.run, config.job.run
    backoff = RestartBackoff(section.restart_backoff_s, furthest_step(run))
    with LauncherWatch(run, section) as watch, StopSignals() as stops:
        note_training_began()
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


def _train_replicas(config: RankConfig, num_ranks: int, after_loss: Callable[[], None]) -> ExitCode:
    """Train in independent replicas, and let the manifest say how that ended where the last one was killed."""
    before = read_manifest(config.run)
    code = train_replicas(config, num_ranks, after_loss)
    ended = _began(before, config.run)
    if ended is not None and ended.exit is None:
        _note_exit(config.run, ended, code)
    return code


def _attempt(config: RankConfig, num_ranks: int, watch: LauncherWatch, stops: StopSignals) -> ExitCode:
    """Launch once, and let the manifest say how it ended where rank 0 was killed or knew less than another."""
    run = config.run
    before = read_manifest(run)
    try:
        code = launch(config, num_ranks, stops, watch)
    except (Preempted, KeyboardInterrupt) as stop:
        ended = _began(before, run)
        if ended is None or ended.exit != ExitCode.DONE:
            if ended is not None and ended.exit is None:
                # Rank 0 was killed before it could say so.
                _note_exit(run, ended, ExitCode.RETRY if isinstance(stop, Preempted) else ExitCode.INTERRUPTED)
            raise
        logger.warning("asked to stop after the last step: the run is complete")
        return ExitCode.DONE
    ended = _began(before, run)
    if ended is not None and ended.exit != code:
        _note_exit(run, ended, code)
    return code


def _note_exit(run: Run, ended: Manifest, code: ExitCode) -> None:
    """Let the manifest say how its newest attempt ended."""
    try:
        ManifestFile(run, ended).close(code)
    except OSError as error:
        # A rank that ended by its own error has said both: what went wrong, last, and that the manifest lacks it.
        level = logging.WARNING if code is ExitCode.RETRY else logging.DEBUG
        logger.log(level, "%s could not be written: %s", run.manifest, error.strerror)


def _began(before: Manifest | None, run: Run) -> Manifest | None:
    """Return the manifest with the attempt that the ranks began since `before`; None where they ended before that."""
    after = read_manifest(run)
    has_begun = after is not None and len(after.attempts) > (len(before.attempts) if before else 0)
    return after if has_begun else None


def _is_stopped(config: RankConfig) -> bool:
    """Return whether the run is where train.stop_after wants it."""
    stop_after = config.job.train.stop_after
    return stop_after is not None and stop_after <= max(config.run.checkpoint_steps(), default=0)


def launch(config: RankConfig, num_ranks: int, stops: StopSignals, watch: LauncherWatch) -> ExitCode:
    """Start `num_ranks` local ranks from `config` and return the exit code for all of them.

    Ranks that `watch` has reported and killed are not reported again. Signals of `stops` are passed on to the ranks,
    which stop after their step; raises KeyboardInterrupt or Preempted once they have.
    """
    raise_stop(stops, "no rank was running")
    threads, asked_s = threads_of_rank(config.job, num_ranks), math.inf
    with LocalRankGroup.start(config, num_ranks, {"OMP_NUM_THREADS": str(threads)}, num_threads=threads) as group:
        while not group.poll():
            if wait_for_ends([group], [stops.descriptor]):
                for number in stops.take():
                    if asked_s == math.inf:
                        asked_s = time.time()
                        watch.note_stop()
                    group.stop(number, config.job.run.grace_s)
    if asked_s < math.inf:
        watch.note_stopped(asked_s, group.killed)
    raise_stop(stops, "the ranks were asked to save and stop")
    failures = [end for end in group.ends if end.exit_code]
    report_failures([end for end in failures if end.pid not in watch.killed], group.killed, config.run)
    return code_of(group.ends, config.run)
