"""Watch thread of each rank: writes the rank's flight record when the training loop is silent, or on request.

The loop's own thread cannot, since it hangs. The watch thread only reads state, and writes one file.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from meshwright.data import loader
from meshwright.data.streams import stream_loader
from meshwright.data.workers.read_thread import READ_THREAD
from meshwright.errors import ExitCode
from meshwright.fault_tolerance.diagnosis_text import location_text
from meshwright.fault_tolerance.evidence import HeartbeatFile
from meshwright.fault_tolerance.hangs.failure_note import FailureNote
from meshwright.fault_tolerance.hangs.hang_limit import LONG_PHASES, NUM_WARM_UP, HangLimit
from meshwright.fault_tolerance.hangs.launcher_watch import GRACE_S
from meshwright.fault_tolerance.hangs.step_record import StepRecord, groups
from meshwright.fault_tolerance.lost_peer import is_lost_peer
from meshwright.fault_tolerance.rank_terminal import say_on_terminal
from meshwright.fault_tolerance.stragglers.phase_times import PhaseTimes
from meshwright.fault_tolerance.torchrun_agent import end_cut_off_agent
from meshwright.log import logger, warning_if_unwritten
from meshwright.parallelism.module_tracker import module_names
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_fsdp import modules_of_unit
from meshwright.spec.job.sections import RunSection
from meshwright.spec.run.rank_records import FlightRecord, Frame
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import append_event

_MAX_POLL_S = 1.0
_LOADERS = (loader.__file__, stream_loader.__file__)
"""Where the loop waits for samples, which another thread reads."""
# Later than our launcher, which knows more; torchrun and Slurm have no such watch.
_END_AFTER_S = GRACE_S + 5.0


class HangWatch:
    """Heartbeat and watch thread of one rank; the loop calls `mark` and `begin_step`."""

    def __init__(self, run: Run, rank: int, num_ranks: int, section: RunSection) -> None:
        self._run, self._rank, self._hang_after_s = run, rank, section.hang_after_s
        self._limit, self._num_steps = HangLimit.of(run, section), 0
        self._failure = FailureNote(run)
        self._heartbeat = HeartbeatFile(run, rank, num_ranks)
        self._record = StepRecord()
        self._modules: dict[int, str] = {}
        self.after_marks: list[Callable[[int, str], None]] = []
        """Called in the loop's thread with the step and the phase of every mark, when it is written."""
        self.phase_times = PhaseTimes()
        """Own times of the loop's phases, for who compares ranks."""
        self.after_follow: Callable[[Stages], None] = _no_model
        """Called with the model once it exists."""
        self._loop_thread = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang_watch", daemon=True)

    def __enter__(self) -> Self:
        self.mark("start")
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if error is not None:
            self._write("the rank ended", traceback.walk_tb(trace), error)
            self._failure.write(self._rank, _one_line(error))
        self.mark("ended") if error is None else self.mark("failed", self._heartbeat.waits_for_rank)
        self._heartbeat.close()
        self._failure.close()

    def mark(self, phase: str, waits_for_rank: int | None = None) -> None:
        """Record that the loop starts `phase`."""
        self.phase_times.enter(phase)
        self._record.enter_phase(phase)
        self._heartbeat.mark(phase, waits_for_rank=waits_for_rank)
        self._after_mark(self._heartbeat.step, phase)

    def begin_step(self, step: int) -> None:
        """Record that the loop starts `step`, with phase "data"."""
        self._record.begin(step)
        self._num_steps += 1
        self.phase_times.begin_step()
        self.phase_times.enter("data")
        self._record.enter_phase("data")
        self._heartbeat.mark("data", step)
        self._after_mark(step, "data")

    def _after_mark(self, step: int, phase: str) -> None:
        for call in self.after_marks:
            call(step, phase)

    def follow(self, stages: Stages) -> None:
        """Set the model whose modules are named in stacks."""
        self._modules = module_names(stages)
        self.after_follow(stages)

    def tracking(self, stages: Stages) -> AbstractContextManager[None]:
        """Record the order and the modules of collectives in the step that runs within the context."""
        return self._record.tracking(stages)

    def _watch(self) -> None:
        reported_s, failed_s = 0.0, None
        asked = self._request()
        poll_s = min(_MAX_POLL_S, self._hang_after_s / 4 or _MAX_POLL_S)
        while not self._stop.wait(poll_s):
            beaten_s, request = self._heartbeat.beaten_s, self._request()
            silent_s = time.monotonic() - beaten_s
            if request != asked:
                asked = request
                self._report("asked")
            elif 0 < self._hang_after_s < silent_s and reported_s != beaten_s:
                reported_s = beaten_s
                self._report(f"silent for {silent_s:.0f} s")
            if failed_s is None and self._failure.exists():
                failed_s = time.monotonic()
                self._report("another rank failed")
            elif failed_s is not None and time.monotonic() - failed_s > _END_AFTER_S:
                # The loop's thread may be in a call that never returns.
                which = self._failure.read()
                logger.error("rank %d is still running %.0f s after %s: it ends", self._rank, _END_AFTER_S, which)
                end_cut_off_agent()
                os._exit(ExitCode.RETRY)
            elif self._is_hung(silent_s):
                self._end_hung(silent_s)

    def _end_hung(self, silent_s: float) -> None:
        self._report("hung")
        say_on_terminal(
            f"rank {self._rank} has not moved for {silent_s:.0f} s, {location_text(self._stack())}: it ends"
        )
        with suppress(OSError):
            append_event(self._run, "hang", duration_s=silent_s)
        end_cut_off_agent()
        os._exit(ExitCode.RETRY)

    def _is_hung(self, silent_s: float) -> bool:
        """Return whether this rank hangs in a step, for longer than our launcher, which ends all ranks, lets it."""
        if self._num_steps <= NUM_WARM_UP or self._heartbeat.phase in LONG_PHASES or silent_s < _END_AFTER_S:
            return False
        return silent_s - _END_AFTER_S > self._limit.seconds

    def _report(self, reason: str) -> None:
        self._write(reason, self._walk(), None)

    def _walk(self) -> Iterable[tuple[FrameType, int]]:
        """Return what the loop's thread is in, the outermost call first, then what reads the samples it waits for."""
        running = sys._current_frames()
        calls = [*traceback.walk_stack(running.get(self._loop_thread))][::-1]
        if any(frame.f_code.co_filename in _LOADERS for frame, _ in calls):
            readers = [thread.ident for thread in threading.enumerate() if thread.name == READ_THREAD]
            calls += [call for ident in readers if ident for call in [*traceback.walk_stack(running.get(ident))][::-1]]
        return calls

    def _stack(self) -> list[Frame]:
        return [self._frame(frame, line) for frame, line in self._walk()]

    def _write(self, reason: str, stack: Iterable[tuple[FrameType, int]], error: BaseException | None) -> None:
        try:
            record = self._flight_record(reason, stack, error)
            path = self._run.flight_record(self._rank)
            with warning_if_unwritten(path):
                # Renamed when complete: a reader may be waiting for it.
                temporary = path.with_suffix(".tmp")
                temporary.write_text(record.model_dump_json(), encoding="utf-8")
                temporary.replace(path)
        except Exception:
            # Every exception: the record reads private state of torch and frames of another thread. An error here must
            # neither stop a run that can continue nor hide the original error.
            logger.exception("rank %d could not write its flight record", self._rank)

    def _flight_record(
        self, reason: str, stack: Iterable[tuple[FrameType, int]], error: BaseException | None
    ) -> FlightRecord:
        collectives, expected, departure = self._record.collectives()
        has_lost_peer = error is not None and is_lost_peer(error)
        if has_lost_peer and collectives and self._heartbeat.waits_for_rank is None:
            # gloo completes a collective that timed out (2.13).
            collectives[-1] = collectives[-1].replace(is_done=False)
        return FlightRecord(
            rank=self._rank,
            pid=os.getpid(),
            reason=reason,
            time_s=time.time(),
            groups=groups(),
            collectives=collectives,
            expected=expected,
            departure=departure,
            stack=[self._frame(frame, line) for frame, line in stack],
            error=None if error is None else _one_line(error),
            is_lost_peer=has_lost_peer,
            waited_s=None if error is None else round(time.monotonic() - self._heartbeat.beaten_s, 3),
        )

    def _frame(self, frame: FrameType, line: int) -> Frame:
        code = frame.f_code
        owner = frame.f_locals.get("self")
        named = [self._modules.get(id(one)) for one in (owner, *modules_of_unit(owner))]
        module = next((name for name in named if name), None)
        return Frame(file=code.co_filename, line=line, function=code.co_qualname, module=module)

    def _request(self) -> float | None:
        with suppress(OSError):
            return self._run.hang_request.stat().st_mtime
        return None


def _no_model(stages: Stages) -> None:
    pass


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def show_stacks_on_signal(path: Path) -> None:
    """Make SIGUSR1 write the stacks of all threads to `path`, even if a thread hangs while holding the GIL."""
    # Never closed: the signal may come at any time.
    faulthandler.register(signal.SIGUSR1, path.open("w"), all_threads=True)
