"""One rank of run_ranks: what happens in its process, from the fork to its answer."""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import types
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class Order:
    """What a rank is told. The arguments stay pickled until the module that defines their types is loaded."""

    file: str
    module: str
    function: str
    num_ranks: int
    timeout_s: float
    device: str
    folder: str
    pickled: bytes
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    working_directory: str = field(default_factory=os.getcwd)


def rank_main(order: Order, rank: int, connection: Connection, output: Path) -> None:
    os.setpgrp()
    _redirect_output(output)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, name="end_with_parent", daemon=True).start()
    try:
        connection.send(pickle.dumps(_call(order, rank)))
    except BaseException:
        connection.send(traceback.format_exc())
        # Not a tidy exit: a process group with work in flight may wait for its peers.
        os._exit(1)


def _call(order: Order, rank: int) -> Any:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order.num_ranks, "LOCAL_WORLD_SIZE": order.num_ranks}
    os.environ.clear()
    os.environ.update(order.environment | {name: str(value) for name, value in local.items()})
    os.chdir(order.working_directory)
    torch.set_num_threads(1)
    fn = getattr(_load(order.file, order.module), order.function)
    args, filters = pickle.loads(order.pickled)
    with warnings.catch_warnings():
        warnings.filters = filters
        if order.device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            _BACKENDS[order.device],
            init_method=f"file://{order.folder}/store",
            rank=rank,
            world_size=order.num_ranks,
            timeout=timedelta(seconds=order.timeout_s),
        )
        result = fn(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
    return result


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


def _redirect_output(output: Path) -> None:
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(target, stream.fileno())


def _end_with_parent() -> None:
    """Leave no rank behind when the test session itself is killed: then nobody is there to kill the ranks."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
