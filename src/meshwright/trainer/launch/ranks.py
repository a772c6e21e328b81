"""This process among the others: its rank, its device, and the few things all ranks must agree on."""

import os
import queue
import signal
import socket
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed as dist
from torch.distributed import FileStore, Store

from meshwright.channels.listening_sockets import closed_afterwards
from meshwright.checkpoint.signed_objects import gather_objects
from meshwright.errors import ConfigError, LostPeer, Retryable
from meshwright.fault_tolerance.lost_peer import is_lost_peer
from meshwright.spec.job.job import Job
from meshwright.spec.job.replicas_section import layout_of_replica
from meshwright.spec.job.sections import RunSection
from meshwright.spec.layout.layout import Layout
from meshwright.trainer.launch.local.store_file import take_store_path
from meshwright.trainer.launch.rank_store import join_store


def choose_device_type(section: RunSection) -> str:
    """Return "cuda" or "cpu" as run.device says; raises ConfigError when CUDA is asked for and not there."""
    if section.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if section.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f'run.device = "cuda" but torch {torch.__version__} sees no CUDA device: '
            'set run.device = "cpu" or "auto", or see what is missing with `meshwright doctor`'
        )
    return section.device


def num_devices(section: RunSection) -> int:
    """Return the devices of this machine that run.device allows: its CUDA devices, or 1 for the CPU."""
    return torch.cuda.device_count() if choose_device_type(section) == "cuda" else 1


def require_devices(section: RunSection, num_ranks: int) -> None:
    """Raise ConfigError where this machine has fewer CUDA devices than the ranks that would each take one."""
    if choose_device_type(section) == "cpu":
        return
    present = torch.cuda.device_count()
    if num_ranks > present:
        raise ConfigError(
            f"{num_ranks} ranks need as many CUDA devices, and torch sees {present}: start {present} or fewer on this "
            'machine, or set run.device = "cpu"'
        )


@dataclass(frozen=True)
class Ranks:
    """A joined process group; use it in a `with` so that it is left on the way out."""

    rank: int
    num_ranks: int
    device: torch.device
    store: Store | None = field(default=None, repr=False, compare=False)
    is_replica: bool = False
    """Whether these ranks are one of several independent replicas: not all ranks of the run."""

    @classmethod
    def join(cls, section: RunSection, *, is_replica: bool = False) -> Self:
        """Return this process's place, from torchrun's variables, once all ranks have joined."""
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ["LOCAL_RANK"])
        device = cls._own_device(choose_device_type(section), local_rank)
        timeout = timedelta(seconds=section.timeout_s)
        try:
            path = take_store_path(os.environ)
            own_store = join_store(rank, num_ranks, section.timeout_s) if path is None else FileStore(path)
            own_store.set_timeout(timeout)
            # NCCL connects ranks later, and listens later.
            with closed_afterwards():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                    store=own_store,
                    rank=rank,
                    world_size=num_ranks,
                    timeout=timeout,
                )
        except RuntimeError as error:
            if (explained := _explained(error, rank, num_ranks)) is None:
                raise
            raise explained from error
        return cls(rank, num_ranks, device, own_store, is_replica)

    @classmethod
    def joined(cls, section: RunSection) -> Self:
        """Return this process's place in a process group that exists, as run_ranks makes one."""
        device = torch.device(choose_device_type(section))
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @staticmethod
    def _own_device(device_type: str, local_rank: int) -> torch.device:
        if device_type == "cpu":
            return torch.device("cpu")
        present = torch.cuda.device_count()
        if local_rank >= present:
            raise ConfigError(
                f"local rank {local_rank} has no CUDA device: {present} are present: "
                f"start {present} ranks on this machine or fewer"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After an error a peer may be gone, and leaving in good order would wait for it.
        if error is None:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def layout_of(self, job: Job) -> Layout:
        """Return the concrete layout of these ranks: of all of the run, or of one of several independent replicas."""
        return layout_of_replica(job, self.num_ranks) if self.is_replica else job.layout.resolve(self.num_ranks)

    def agree_on(self, wish: signal.Signals | None) -> signal.Signals | None:
        """Return the strongest stop signal that any rank got (SIGTERM, SIGINT, SIGHUP), or None; a collective."""
        number = torch.tensor(wish or 0, device=self.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return signal.Signals(int(number)) if number else None

    def fails_first(self) -> bool:
        """Return whether no rank has called this before; False, too, where the store went with its rank.

        Where the store does not answer within seconds, the first rank of each node counts as the first of all.
        """
        if self.store is None:
            return self.is_first
        answers: queue.Queue[bool] = queue.Queue()
        # The call has no limit of its own, and the process may end before it returns.
        threading.Thread(target=_is_first_failure, args=(self.store, answers), daemon=True).start()
        try:
            return answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            return _is_first_of_node()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, by rank; a collective for the start of a run, not for steps."""
        return gather_objects(value, None)


_ANSWER_S = 5.0
"""Seconds in which a store that is reached has answered."""


def _is_first_failure(store: Store, answers: queue.Queue[bool]) -> None:
    try:
        answers.put(store.add("failures", 1) == 1)
    except RuntimeError as error:
        # As in limit_silence: no answer, and no process that closed the connection.
        answers.put("timed out" in str(error) and _is_first_of_node())


def _is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _explained(error: RuntimeError, rank: int, num_ranks: int) -> Retryable | None:
    """Return what to say of an error while ranks join, None where neither the port nor the network is its cause."""
    if "EADDRINUSE" in str(error):
        port = os.environ["MASTER_PORT"]
        return Retryable(
            f"MASTER_PORT = {port} of {os.environ['MASTER_ADDR']} is in use by another process (EADDRINUSE): "
            "end it (`ss -ltnp` lists who listens), or choose another port for all ranks: torchrun "
            "--master-port, or the port of --rdzv-endpoint"
        )
    if not is_lost_peer(error):
        return None
    message = f"rank {rank} of {num_ranks} could not reach the others: {error}"
    if int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) < num_ranks:
        message += (
            f": other machines reach this one at the address of its host name, {socket.gethostname()}: if /etc/hosts "
            "gives 127.0.1.1, or the address of another network, set GLOO_SOCKET_IFNAME (on GPUs NCCL_SOCKET_IFNAME, "
            "too) to the interface that connects them (`ip address`)"
        )
    return LostPeer(message)
