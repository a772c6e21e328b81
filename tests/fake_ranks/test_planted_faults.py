"""Each planted mistake is found, with the rank and the line that are to blame; a sound program passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "examples" / "planted_faults.py"


def line_of(text: str) -> str:
    """Return where the only line of the programs that holds `text` is, as the tool names it."""
    [number] = [n for n, line in enumerate(PROGRAMS.read_text().splitlines(), start=1) if text in line]
    return f"{PROGRAMS.name}:{number}"


def simulated(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "simulate", "--build", f"{PROGRAMS}:{program}", "--ranks", "4"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_mismatch_names_the_rank_and_the_line() -> None:
    found = simulated("reversed_order")
    assert found.returncode == 2
    assert "culprit: rank 3," in found.stdout
    assert line_of("dist.all_reduce(gradient)") in found.stdout


@pytest.mark.long
def test_a_deadlock_names_everybody_in_the_circle() -> None:
    found = simulated("ring_deadlock")
    assert found.returncode == 2
    assert "rank 0 for rank 3, rank 3 for rank 2, rank 2 for rank 1, rank 1 for rank 0" in found.stdout
    assert line_of("dist.recv(") in found.stdout


@pytest.mark.long
def test_a_collective_too_few_names_who_skipped_it() -> None:
    found = simulated("skipped_collective")
    assert found.returncode == 2
    assert "culprit: rank 1: nothing more" in found.stdout
    assert line_of("dist.all_reduce(loss)") in found.stdout


@pytest.mark.long
def test_a_sound_program_passes() -> None:
    assert simulated("sound").returncode == 0
