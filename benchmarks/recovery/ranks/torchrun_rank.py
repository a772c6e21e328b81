"""A rank of DDP under torchrun --max-restarts, with a checkpoint every few steps; argument: the steps of the run.

With STORE_PREFIX=1 each attempt has a prefix of its own in torchrun's store, which torchrun's own does not.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.ranks.record import RUN, Record
from benchmarks.recovery.ranks.workload import LEARNING_RATE, batch, new_network

SAVE_EVERY = 5


def join(timeout_s: float) -> None:
    """Join the other ranks."""
    store = None
    if os.environ.get("STORE_PREFIX"):
        shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", shared)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s))


def train(num_steps: int, record: Record, rank: int, num_ranks: int) -> None:
    """Train from the newest checkpoint to `num_steps`; rank 0 saves."""
    checkpoint = Path(os.environ[RUN]) / "checkpoint.pt"
    network = new_network()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE)
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step in range(start + 1, num_steps + 1):
        inputs, targets = batch(step, rank, num_ranks)
        loss = network.loss(model(inputs), targets)
        record.maybe_die(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step(step, [inputs])
        if step % SAVE_EVERY == 0 and rank == 0:
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    record.finish(network.parameters())


if __name__ == "__main__":
    torch.set_num_threads(1)
    join(30.0)
    train(int(sys.argv[1]), Record(dist.get_rank()), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
