"""A rank of DDP in NVRx's in-process wrapper, which starts the function again in the processes that are left."""

import os
import sys
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist

from benchmarks.recovery.ranks.record import Record
from benchmarks.recovery.ranks.torchrun_rank import train

FIRST_RANK = int(os.environ["RANK"])


@inprocess.Wrapper(  # type: ignore[untyped-decorator]
    # Another port than MASTER_PORT, which a new process group takes.
    store_kwargs={"timeout": timedelta(seconds=60), "port": int(os.environ["MASTER_PORT"]) + 1},
    initialize=inprocess.initialize.RetryController(max_iterations=4, min_world_size=1),
    abort=inprocess.abort.AbortTorchDistributed(),
    soft_timeout=timedelta(seconds=5),
    hard_timeout=timedelta(seconds=8),
    heartbeat_interval=timedelta(seconds=0.5),
    heartbeat_timeout=timedelta(seconds=3),
    monitor_process_interval=timedelta(seconds=0.2),
    monitor_thread_interval=timedelta(seconds=0.2),
    progress_watchdog_interval=timedelta(seconds=0.2),
)
def attempt(num_steps: int) -> None:
    """Train, from the newest checkpoint."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    train(num_steps, Record(FIRST_RANK), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    attempt(int(sys.argv[1]))
