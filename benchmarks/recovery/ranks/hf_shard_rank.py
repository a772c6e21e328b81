"""A rank of FSDP2 that saves its shards by DCP's writer for Hugging Face, once, and continues from them.

A rank that is killed after the save has lost its file; with KEEPS_SHARDS=1 it has not.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.recovery.ranks.record import RUN, Record
from benchmarks.recovery.ranks.torchrun_rank import SAVE_EVERY
from benchmarks.recovery.ranks.workload import batch, full_tensor, new_network


def main(num_steps: int) -> None:
    """Train by SGD, which has no state of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    folder = Path(os.environ[RUN]) / "checkpoint"
    record, network = Record(rank), new_network()
    fully_shard(network, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    start = 0
    if folder.exists():
        state = network.state_dict()
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
        network.load_state_dict(state)
        start = SAVE_EVERY
    for step in range(start + 1, num_steps + 1):
        inputs, targets = batch(step, rank, num_ranks)
        network.loss(network(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step(step, [inputs])
        if step == SAVE_EVERY:
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            dcp.save(network.state_dict(), storage_writer=writer)
            dist.barrier()
            if record.is_to_die(step) and not os.environ.get("KEEPS_SHARDS"):
                next(folder.glob(f"shard-{rank + 1:05d}-*")).unlink()
            record.maybe_die(step, "checkpoint", damaged="checkpoint")
    record.finish([full_tensor(parameter) for parameter in network.parameters()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
