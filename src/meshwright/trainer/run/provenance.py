"""Versions of software and the git commit of a run."""

import platform
import subprocess
from importlib import metadata

import torch

PACKAGES = ("meshwright", "numpy", "pydantic", "safetensors", "transformers")


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and each package that is installed."""
    # torch.__version__ includes the build, +cpu or +cu130, unlike the package metadata.
    found = {"python": platform.python_version(), "platform": platform.platform(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Return the working directory's commit, with a + if files differ from it; None outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True, timeout=10).stdout.strip()
