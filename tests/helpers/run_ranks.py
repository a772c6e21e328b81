"""run_ranks for tests: the trainer's own, for functions of test files, with failures that pytest shows as failures.

A rank has the caller's warning filters, so that a warning which fails a test fails it on any rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import time
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from meshwright.trainer.launch.local import local_ranks


def run_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 300, device: str = "cpu"
) -> list[Any]:
    """Return what `fn(*args)` returned on each rank, by rank; AssertionError with all ranks' tracebacks if one failed.

    `fn` is a function at the top level of a test file; everything else as in trainer.launch.local.local_ranks.
    """
    started_s = time.perf_counter()
    file, module, name = _address(fn)
    try:
        return local_ranks.run_ranks(
            call_from_file,
            num_ranks,
            (file, module, name),
            pickle.dumps(args),
            timeout_s=timeout_s,
            device=device,
            preload=("pytest", "run_ranks"),
        )
    except local_ranks.RanksFailed as failure:
        raise AssertionError(f"{name} on {failure}") from None
    finally:
        print(f"run_ranks: {name} on {num_ranks} ranks took {time.perf_counter() - started_s:.2f} s")


def call_from_file(address: tuple[str, str, str], pickled: bytes) -> Any:
    """Return what the function at `address` returns; its arguments' types may be defined next to it."""
    file, module, name = address
    fn = getattr(_load(file, module), name)
    return fn(*pickle.loads(pickled))


def _address(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the file, module and name that `fn` is found by in another process."""
    module = sys.modules.get(getattr(fn, "__module__", ""))
    name = getattr(fn, "__qualname__", "")
    if module is None or not module.__file__ or getattr(module, name, None) is not fn:
        raise TypeError(f"run_ranks got {name or fn!r}: pass a function from the top level of a module")
    return module.__file__, module.__name__, name


def _load(file: str, name: str) -> types.ModuleType:
    """Return the module, under the name it has in the caller: pytest gives test files names that no path leads to."""
    spec = _find(name)
    if spec is not None and spec.origin == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    parts = name.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return None
