"""run_ranks itself: results by rank, and every way a rank can fail shown with its rank."""

import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from run_ranks import run_ranks


@dataclass
class Point:
    x: int


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def move(point: Point, names: list[str]) -> tuple[Point, list[str]]:
    return Point(point.x + dist.get_rank()), [*names, os.environ["RANK"], os.getcwd(), os.environ.get("COLOUR", "")]


def leave_at_once() -> int:
    return dist.get_rank()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such luck")
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("going to sleep")
        time.sleep(60)
    dist.barrier()


def end_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn() -> None:
    warnings.warn("mind the gap", stacklevel=1)


def leave_a_process(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"{dist.get_rank()}.pid").write_text(str(child.pid))
    child.returncode = 0  # Popen would warn about a child that it has not seen end.


def return_a_lambda() -> object:
    return lambda: None


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_eight_ranks_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(sum_of_ranks, 8) == [28.0] * 8
    assert "sum_of_ranks on 8 ranks took" in capsys.readouterr().out


def test_a_rank_has_the_callers_arguments_environment_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "green")
    results = run_ranks(move, 2, Point(1), ["a"])
    assert results == [(Point(1), ["a", "0", str(tmp_path), "green"]), (Point(2), ["a", "1", str(tmp_path), "green"])]


def test_ranks_with_nothing_to_do_leave_only_when_all_have_met() -> None:
    for _ in range(5):
        assert run_ranks(leave_at_once, 6) == [0, 1, 2, 3, 4, 5]


def test_an_exception_is_shown_with_its_rank() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed first.*fail_on_rank_1.*ValueError: no such luck"):
        run_ranks(fail_on_rank_1, 3)


def test_a_hang_is_shown_with_its_stack() -> None:
    # The time counts from the start, which in a process that has had no ranks imports torch.
    run_ranks(leave_at_once, 2)
    with pytest.raises(AssertionError, match="0 failed, 2 still busy at the timeout") as failure:
        run_ranks(hang_on_rank_1, 2, timeout_s=5)
    stuck = str(failure.value).split("--- rank 1 was still busy")[1]
    assert "going to sleep" in stuck
    assert "in hang_on_rank_1" in stuck


@pytest.mark.parametrize(("how", "message"), [("exit", "exit code 3"), ("kill", "killed by SIGKILL")])
def test_a_rank_that_dies_is_reported(how: str, message: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)rank 1 failed.*{message}"):
        run_ranks(end_on_rank_1, 2, how)


def test_a_warning_on_a_rank_is_an_error() -> None:
    with pytest.raises(AssertionError, match="UserWarning: mind the gap"):
        run_ranks(warn, 1)


@pytest.mark.filterwarnings("ignore:mind the gap")
def test_a_warning_that_the_test_allows_is_allowed_on_its_ranks() -> None:
    assert run_ranks(warn, 1) == [None]


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    run_ranks(leave_a_process, 2, tmp_path)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    deadline_s = time.monotonic() + 120
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def test_a_function_that_no_other_process_can_find_is_refused() -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(lambda: None, 1)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(AssertionError, match="rank 0 failed first"):
        run_ranks(return_a_lambda, 1)
