"""Imports torch and the package's run half, for the fork server, which imports modules by their names."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress
from pathlib import Path

import meshwright
from meshwright.garbage import kept_garbage

_RUN_HALF = ("models", "data", "parallelism", "checkpoint", "fault_tolerance", "trainer")
_EXTRAS = ("float8", "torch_scaled_matmul")
"""In the names of modules that import torchao: most runs have no use for the second that takes."""
_TORCH = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


def _import_all() -> None:
    ours = (
        found.name
        for half in _RUN_HALF
        for found in pkgutil.walk_packages([str(Path(meshwright.__path__[0], half))], f"meshwright.{half}.")
        if not any(extra in found.name for extra in _EXTRAS)
    )
    # What is frozen now, no rank looks through for garbage.
    with kept_garbage():
        for name in (*_TORCH, *ours):
            # A rank that needs what cannot be imported says so.
            with suppress(ImportError):
                importlib.import_module(name)


_import_all()
