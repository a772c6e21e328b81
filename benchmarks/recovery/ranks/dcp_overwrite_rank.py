"""A rank of FSDP2 that overwrites one DCP checkpoint, as torch's examples do; argument: the steps of the run.

With SAVES_ANEW=1 each checkpoint has a folder of its own, and the newest with metadata is loaded.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.recovery.ranks.record import RUN, Record
from benchmarks.recovery.ranks.torchrun_rank import SAVE_EVERY
from benchmarks.recovery.ranks.workload import LEARNING_RATE, batch, full_tensor, new_network


class Writer(dcp.FileSystemWriter):
    """DCP's writer, of a rank that may die before its first byte, when others have written theirs."""

    def __init__(self, path: Path, record: Record, step: int) -> None:
        super().__init__(path)
        self._record, self._step = record, step

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write, or die."""
        if self._record.is_to_die(self._step):
            time.sleep(1.0)
            self._record.maybe_die(self._step, "checkpoint")
        return super().write_data(plan, planner)


def folder_of(step: int) -> Path:
    """Return where the checkpoint after `step` is saved."""
    name = f"checkpoint-{step:03d}" if os.environ.get("SAVES_ANEW") else "checkpoint"
    return Path(os.environ[RUN]) / name


def main(num_steps: int) -> None:
    """Train from the newest checkpoint that has metadata."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    record, network = Record(rank), new_network()
    fully_shard(network, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE)

    def state(step: int) -> dict[str, Any]:
        model, moments = get_state_dict(network, optimizer)
        return {"model": model, "optimizer": moments, "step": torch.tensor(step)}

    start = 0
    if whole := sorted(path.parent for path in Path(os.environ[RUN]).glob("checkpoint*/.metadata")):
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=whole[-1])
        set_state_dict(network, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        start = int(loaded["step"])
    for step in range(start + 1, num_steps + 1):
        inputs, targets = batch(step, rank, num_ranks)
        network.loss(network(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step(step, [inputs])
        if step % SAVE_EVERY == 0:
            dcp.save(state(step), storage_writer=Writer(folder_of(step), record, step))
    record.finish([full_tensor(parameter) for parameter in network.parameters()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
