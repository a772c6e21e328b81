"""One rank of run_ranks: what happens in its process, from the fork to its answer."""

import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.channels.channel import new_token
from meshwright.channels.listening_sockets import closed_afterwards
from meshwright.checkpoint.signed_objects import TOKEN_VARIABLE
from meshwright.trainer.launch.host_process import prepare_host_process
from meshwright.trainer.launch.local.rank_fork_server import accept_signals, wait_for_caller
from meshwright.trainer.launch.local.store_file import loopback_interfaces

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class Order:
    """What a rank runs: a function and its arguments, pickled, in the environment of the caller."""

    module: str
    """Where the function is defined."""
    pickled_call: bytes
    num_ranks: int
    timeout_s: float
    device: str
    folder: str
    token: str = field(default_factory=new_token)
    """Of this job: what its ranks send each other carries a proof of it."""
    warning_filters: Any = field(default_factory=lambda: list(warnings.filters))
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    working_directory: str = field(default_factory=os.getcwd)


class Failure(NamedTuple):
    """Why a rank has no result."""

    traceback: str
    reason: str
    """The same in a line or two."""


def rank_main(order: Order, rank: int, connection: Connection, output: Path) -> None:
    """Run the order as `rank` and send back its pickled result, or a Failure."""
    os.setpgrp()
    accept_signals()
    _redirect_output(output)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_caller, name="end_with_caller", daemon=True).start()
    try:
        connection.send(pickle.dumps(_call(order, rank)))
    except BaseException as error:
        connection.send(Failure(traceback.format_exc(), f"{type(error).__name__}: {error}"))
        # Not a tidy exit: a process group with work in flight may wait for its peers.
        os._exit(1)


def _call(order: Order, rank: int) -> Any:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order.num_ranks, "LOCAL_WORLD_SIZE": order.num_ranks}
    os.environ.clear()
    place = {name: str(value) for name, value in local.items()}
    os.environ.update(loopback_interfaces(order.environment) | order.environment | place)
    os.environ[TOKEN_VARIABLE] = order.token
    os.chdir(order.working_directory)
    torch.set_num_threads(1)
    fn, args = pickle.loads(order.pickled_call)
    with warnings.catch_warnings():
        warnings.filters = order.warning_filters
        if order.device == "cuda":
            torch.cuda.set_device(rank)
        else:
            # As ranks of a run do: what is measured here predicts them.
            prepare_host_process(os.environ)
        with closed_afterwards():
            dist.init_process_group(
                _BACKENDS[order.device],
                init_method=f"file://{order.folder}/store",
                rank=rank,
                world_size=order.num_ranks,
                timeout=timedelta(seconds=order.timeout_s),
            )
        if order.device == "cpu":
            # gloo connects all ranks at once: one that has nothing to do must not leave while others still connect.
            dist.barrier()
        result = fn(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
    return result


def _redirect_output(output: Path) -> None:
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(target, stream.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a rank that hangs has printed last would stay in its buffer.
        sys.stdout.reconfigure(line_buffering=True)


def _end_with_caller() -> None:
    """Leave no rank behind when the caller itself is killed and cannot end the ranks."""
    wait_for_caller()
    os._exit(1)
