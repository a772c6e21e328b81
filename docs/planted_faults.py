"""Writes docs/planted_faults.md: each program of examples/planted_faults.py with what `meshwright simulate` finds.

    python docs/planted_faults.py

The two sections on jobs, at its end, take minutes and stay as they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
PROGRAMS = "examples/planted_faults.py"
FIRST_JOB = "## Out of memory"
TITLES = {
    "sound": "Nothing",
    "ring_deadlock": "A deadlock",
    "reversed_order": "Another order",
    "skipped_collective": "A collective too few",
    "missing_barrier": "A missing barrier",
    "other_root": "Another root",
    "other_reduction": "Another reduction",
    "unequal_splits": "Splits that do not match",
    "cpu_tensors": "A collective on CPU tensors",
    "other_group": "Another group",
    "bad_sample": "An exception on one rank",
    "never_waited": "Work that nothing waits for",
    "unordered_streams": "Two streams and nothing that orders them",
}
INTRODUCTION = """# What a dry run finds before a job starts

Mistakes planted on purpose, each with the command and the tool's own answer: exit code 2, or 0 where it is a warning.
The programs are in `examples/planted_faults.py`: plain torch, no job and no model of ours. This page is written by
`python docs/planted_faults.py`.

The culprit is the minority: the rank that does otherwise than most ranks of its group, or than most groups of that
kind. Lines are those of the user's own files: the innermost call outside of installed packages.
"""


def main() -> None:
    """Write the page."""
    jobs = PAGE.read_text(encoding="utf-8").partition(FIRST_JOB)[2]
    sections = [section(name, title) for name, title in TITLES.items()]
    PAGE.write_text("\n".join([INTRODUCTION, *sections, FIRST_JOB + jobs]), encoding="utf-8")


def section(name: str, title: str) -> str:
    """Return the section of one program."""
    command = ["meshwright", "simulate", "--build", f"{PROGRAMS}:{name}", "--ranks", "4"]
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    words = docstring(name).removeprefix("Return a step ").removeprefix("in which ").removeprefix("that ")
    said = findings(run.stdout) or run.stderr.strip().replace(f"{ROOT}/", "") or "no problems, no warnings"
    shown = f"$ {' '.join(command)}\n{said}\n(exit code {run.returncode})"
    return f"## {title}\n\n{words[0].upper()}{words[1:]}\n\n```\n{shown}\n```\n"


def docstring(name: str) -> str:
    """Return the first line of a program's docstring."""
    text = (ROOT / PROGRAMS).read_text(encoding="utf-8")
    found = re.search(rf'^def {name}\(.*?"""(.*?)"""', text, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[1]


def findings(page: str) -> str:
    """Return problems and warnings of a dry run's page, without its head and tables."""
    parts = [part for part in page.split("\n\n") if part.startswith(("the step would", "warnings"))]
    return "\n".join(line.rstrip() for part in parts for line in part.splitlines())


if __name__ == "__main__":
    main()
