"""Faults of a chaos run happen where they say, and once."""

import threading
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from meshwright.fault_tolerance.injection.injector import InjectedError, Injector
from meshwright.fault_tolerance.stragglers.phase_times import phase_of
from meshwright.spec.fault import INJECTED, SIMULATED, Fault, injection_problems
from meshwright.spec.run.chaos_report import Injection
from meshwright.spec.run.run import Run

FAULT = Fault(kind="exception", rank=1, step=3, phase="optimizer")
MARKS = ("data", "action 0F0", "action 0B0", "action 0SEND_F1", "action 0W1", "gradients", "optimizer", "agree")


def come_to(injector: Injector, *steps: int) -> tuple[int, str] | None:
    """Enter all marks of some steps, and return where a fault happened."""
    for step in steps:
        for mark in MARKS:
            try:
                injector.enter(step, mark)
            except InjectedError:
                return step, mark
    return None


def test_a_fault_happens_in_its_step_and_phase_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert come_to(Injector(run, 1, [FAULT], 0), 1, 2, 3, 4) == (3, "optimizer")
    injection = Injection.from_json(run.injected_fault(0).read_text(encoding="utf-8"))
    assert (injection.step, injection.mark) == (3, "optimizer")
    assert come_to(Injector(run, 1, [FAULT], 3), 1, 2, 3, 4) is None


def test_other_ranks_pass(tmp_path: Path) -> None:
    assert come_to(Injector(Run(tmp_path), 0, [FAULT], 0), 1, 2, 3, 4) is None


@pytest.mark.parametrize(
    ("phase", "mark"), [(None, "data"), ("forward", "action 0F0"), ("backward", "action 0B0"), ("agree", "agree")]
)
def test_a_phase_is_its_first_mark(tmp_path: Path, phase: str | None, mark: str) -> None:
    fault = FAULT.replace(phase=phase)
    assert come_to(Injector(Run(tmp_path), 1, [fault], 0), 3) == (3, mark)


def test_a_step_that_is_left_out_is_the_first(tmp_path: Path) -> None:
    assert come_to(Injector(Run(tmp_path), 1, [FAULT.replace(step=None)], 0), 7, 8) == (7, "optimizer")


def test_sends_belong_to_the_way_that_they_serve() -> None:
    assert [phase_of(mark) for mark in ("action 1SEND_F0", "action 1RECV_B0", "action 1I2")] == [
        "forward",
        "backward",
        "backward",
    ]


@pytest.mark.parametrize(("last_step", "happens"), [(0, False), (4, False), (5, True), (9, True)])
def test_a_restore_is_that_after_its_step(tmp_path: Path, last_step: int, happens: bool) -> None:
    injector = Injector(Run(tmp_path), 1, [FAULT.replace(step=5, phase="restore")], last_step)
    if happens:
        with pytest.raises(InjectedError):
            injector.enter(0, "restore")
    else:
        injector.enter(0, "restore")


def test_an_injected_error_is_one_that_is_tried_again() -> None:
    assert InjectedError.exit_code == ExitCode.RETRY


def test_a_slow_rank_goes_slow_in_each_step_that_it_is_slow_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    always = Fault(kind="slow-rank", rank=1, argument=3.0)
    come_to(Injector(Run(tmp_path / "always"), 1, [always], 0), 1, 2, 3)
    assert len(slept) == 3
    come_to(Injector(Run(tmp_path / "once"), 1, [always.replace(step=2)], 0), 1, 2, 3)
    assert len(slept) == 4
    assert min(slept) >= 0


def test_a_hang_is_in_the_thread_that_enters(tmp_path: Path) -> None:
    injector = Injector(Run(tmp_path), 1, [FAULT.replace(kind="hang")], 0)
    thread = threading.Thread(target=come_to, args=(injector, 3), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert Run(tmp_path).injected_fault(0).exists()


def test_what_cannot_be_injected_is_refused_by_name() -> None:
    wrong = [
        Fault(kind="slow-link", rank=0, step=1),
        Fault(kind="crash", rank=2, step=1),
        Fault(kind="crash", rank=0, step=11),
        Fault(kind="crash", rank=0, step=1, phase="update"),
        Fault(kind="slow-rank", rank=0, step=1),
    ]
    keys = ("kind", "rank", "step", "phase", "argument")
    problems = injection_problems(wrong, num_ranks=2, num_steps=10)
    assert [problem.split(": ")[1].split(" ")[0] for problem in problems] == list(keys)
    assert problems[1].startswith("fault 2 (crash): rank = 2, and there are 2: use one from 0 to 1")
    assert not injection_problems([FAULT], num_ranks=2, num_steps=10)
    assert set(SIMULATED) - set(INJECTED) == {"slow-link", "drop-message"}
