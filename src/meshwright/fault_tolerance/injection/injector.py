"""Injector: makes the faults of a chaos run happen to this rank, each once, where they say.

That a fault has happened is on disk before it happens, so that the attempt after it passes.
"""

import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from meshwright.errors import Retryable
from meshwright.fault_tolerance.hangs.hang_watch import HangWatch
from meshwright.fault_tolerance.injection.injection_note import note_injection
from meshwright.fault_tolerance.injection.number_faults import spoil
from meshwright.fault_tolerance.step_ledger import StepLedger
from meshwright.fault_tolerance.storage.damage import can_damage, damage_newest
from meshwright.fault_tolerance.storage.storage_faults import under_disk_faults
from meshwright.fault_tolerance.stragglers.phase_times import phase_of
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.spec.fault import NUMBER_FAULTS, PHASE_OF, Fault, FaultKind, Faults
from meshwright.spec.run.run import Run
from meshwright.spec.storage_fault import DAMAGES

_MANY_S: Final = 10**6


class InjectedError(Retryable):
    """The error of a fault of kind "exception": one that another attempt may pass, such as a device's."""


@contextmanager
def under_faults(run: Run, rank: int, faults: Faults | None, watch: HangWatch) -> Iterator[StepLedger | None]:
    """Let `faults` happen to this rank at the marks of `watch`, and yield its ledger; None, and nothing, without."""
    if faults is None:
        yield None
        return
    with StepLedger(run, rank) as ledger, under_disk_faults(run, rank, faults, ledger.last_step):
        injector = Injector(run, rank, faults, ledger.last_step)
        watch.after_marks.append(injector.enter)
        watch.after_follow = injector.follow
        yield ledger


class Injector:
    """What befalls one rank; `enter` is called with each phase of the training loop."""

    def __init__(self, run: Run, rank: int, faults: Sequence[Fault], last_step: int) -> None:
        self._run = run
        self._last_step = last_step
        """The furthest that an earlier attempt came; 0 for none."""
        self._pending = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.rank == rank and not fault.is_of_disk and not run.injected_fault(number).exists()
        }
        self._step_began_s = time.monotonic()
        self._model: Stages | None = None

    def follow(self, model: Stages) -> None:
        """Set the model whose numbers faults change."""
        self._model = model

    def enter(self, step: int, mark: str) -> None:
        """Make happen what befalls this rank as it enters the phase that `mark` names, in `step`."""
        if not self._pending:
            return
        phase = phase_of(mark)
        if phase == "data":
            self._step_began_s = time.monotonic()
        for number, fault in list(self._pending.items()):
            if not self._is_here(fault, step, phase):
                continue
            if fault.kind == "slow-rank":
                self._slow_down(number, fault)
            else:
                del self._pending[number]
                self._note(number, fault, step, mark)
                if fault.kind in NUMBER_FAULTS:
                    spoil(fault, self._model)
                else:
                    _INJECT.get(fault.kind, _crash)()

    def _is_here(self, fault: Fault, step: int, phase: str) -> bool:
        if phase == "restore":
            is_possible = fault.kind not in DAMAGES or can_damage(self._run)
            return is_possible and fault.phase == phase and 0 < (fault.step or 1) <= self._last_step
        if fault.kind in DAMAGES and phase == (fault.phase or "data"):
            return step >= (fault.step or 1) and can_damage(self._run)
        wanted = fault.phase or PHASE_OF.get(fault.kind, "data")
        return phase == wanted and (fault.step is None or fault.step == step)

    def _slow_down(self, number: int, fault: Fault) -> None:
        """Let the rank take `argument` times as long as it has since its step began."""
        if not self._run.injected_fault(number).exists():
            note_injection(self._run, number, fault.step or 0, "slow-rank")
        if fault.step is not None:
            del self._pending[number]
        time.sleep((fault.argument - 1) * (time.monotonic() - self._step_began_s))

    def _note(self, number: int, fault: Fault, step: int, mark: str) -> None:
        if fault.kind not in DAMAGES:
            note_injection(self._run, number, step, mark)
            return
        # The crash after it is what must not happen twice.
        note_injection(self._run, number, step, mark, damage_newest(self._run, fault, number))


def _raise() -> None:
    raise InjectedError("a fault that `meshwright chaos` injected")


def _segfault() -> None:
    # The stack of a fault on purpose is no news.
    faulthandler.disable()
    ctypes.string_at(0)


def _signal(number: signal.Signals) -> Callable[[], None]:
    def send() -> None:
        os.kill(os.getpid(), number)

    return send


def _hang() -> None:
    threading.Event().wait(_MANY_S)


def _hold_gil() -> None:
    # A lock taken twice: unlike a sleep, no signal ends it. Unlike CDLL, PyDLL keeps Python's own lock in a call.
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


_crash = _signal(signal.SIGKILL)
"""Also what follows any damage."""
_INJECT: dict[FaultKind, Callable[[], None]] = {
    "crash": _crash,
    "segfault": _segfault,
    "abort": os.abort,
    "exception": _raise,
    "terminate": _signal(signal.SIGTERM),
    "hang": _hang,
    "hold-gil": _hold_gil,
    "stop": _signal(signal.SIGSTOP),
}
