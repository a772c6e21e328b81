"""Environments of the peers: each its own, from the pinned requirements next to this file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

REQUIREMENTS = Path(__file__).parent
ROOT = REQUIREMENTS.parent.parent


def python_of(environment: str | None, folder: Path) -> Path:
    """Return the interpreter of an environment, which is made where it is not there yet; None is this one's.

    Raises CalledProcessError if pip cannot install what the environment needs.
    """
    if environment is None:
        return Path(sys.executable)
    python, requirements = folder / environment / "bin" / "python", REQUIREMENTS / f"{environment}.txt"
    done = folder / environment / "requirements.txt"
    if done.exists() and done.read_text() == requirements.read_text():
        return python
    Console(stderr=True).print(f"making the environment {folder / environment} from {requirements.name} ...")
    subprocess.run((sys.executable, "-m", "venv", "--clear", str(folder / environment)), check=True)
    command = (str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements))
    subprocess.run(command, check=True, stdout=sys.stderr)
    done.write_text(requirements.read_text())
    return python


def variables_of(environment: str | None) -> dict[str, str]:
    """Return the variables of its processes: a peer sees this folder's programs and none of our packages."""
    return {**os.environ, **({} if environment is None else {"PYTHONPATH": str(ROOT)})}


def versions_of(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed versions."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.run((str(python), "-c", code, *packages), check=True, capture_output=True, text=True)
    return dict(zip(packages, found.stdout.split(), strict=True))
