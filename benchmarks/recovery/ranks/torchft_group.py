"""A replica group of one rank under torchft: per-step quorum, weights of a live group after a restart, no checkpoint.

WRAPPER names a class of torchft.ddp; without it each gradient is reduced by the
manager and waited for. A step of torchft counts once it is committed.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo, ddp

from benchmarks.recovery.ranks.record import Record
from benchmarks.recovery.ranks.workload import LEARNING_RATE, batch, new_network


def main(num_steps: int) -> None:
    """Train until `num_steps` are committed."""
    group, num_groups = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    record, network = Record(group), new_network()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    inner = torch.optim.AdamW(network.parameters(), LEARNING_RATE)

    def load(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=int(os.environ.get("MIN_GROUPS", "1")),
        load_state_dict=load,
        state_dict=lambda: {"model": network.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"group-{group}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
    )
    wrapper = os.environ.get("WRAPPER")
    model = network if wrapper is None else getattr(ddp, wrapper)(manager, network)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < num_steps:
        optimizer.zero_grad()
        # The quorum may move this group to the step of another.
        manager.wait_quorum()
        step = manager.current_step() + 1
        inputs, targets = batch(step, group, num_groups)
        loss = network.loss(model(inputs), targets)
        record.maybe_die(step)
        loss.backward()
        if wrapper is None:
            for work in [manager.allreduce(parameter.grad) for parameter in network.parameters()]:
                work.wait()
        optimizer.step()
        if manager.current_step() >= step:
            record.step(step, [inputs])
    record.finish(network.parameters())
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
