"""docs/mistakes.md shows what the commands really say."""

import os
import subprocess
import sys

import pytest

from examples.mistakes import MISTAKES, PAGE, section
from repository import ROOT

SCRIPT = ROOT / "examples" / "mistakes.py"
NUM_QUICK = 3
"""Mistakes of the page that quick tests make; the others are made with the whole page."""
WITHOUT_TRAINING = [
    pytest.param(number, id=mistake.title, marks=() if number <= NUM_QUICK else pytest.mark.long)
    for number, mistake in enumerate(MISTAKES, start=1)
    if mistake.prepare is None
]


@pytest.mark.parametrize("number", WITHOUT_TRAINING)
def test_a_mistake_is_told_as_the_page_says(number: int) -> None:
    assert section(number, MISTAKES[number - 1]) in PAGE.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_gallery_of_mistakes_is_what_the_commands_say() -> None:
    # The environment that conftest made: readline, which pytest imports, sets COLUMNS behind Python's back.
    command, environment = [sys.executable, str(SCRIPT), "--check"], dict(os.environ)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
