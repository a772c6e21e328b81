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
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    ("program", "culprit", "code"),
    [
        ("reversed_order", "culprit: rank 3,", "dist.all_reduce(gradient)"),
        pytest.param(
            "ring_deadlock",
            "rank 0 for rank 3, rank 3 for rank 2, rank 2 for rank 1, rank 1 for rank 0",
            "dist.recv(",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "skipped_collective", "culprit: rank 1: nothing more", "dist.all_reduce(loss)", marks=pytest.mark.long
        ),
    ],
)
def test_a_mistake_names_the_ranks_and_the_line(program: str, culprit: str, code: str) -> None:
    found = simulated(program)
    assert found.returncode == 2
    assert culprit in found.stdout
    assert line_of(code) in found.stdout


@pytest.mark.long
def test_a_sound_program_passes() -> None:
    assert simulated("sound").returncode == 0
