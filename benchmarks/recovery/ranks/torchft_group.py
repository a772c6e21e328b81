"""A replica group of one rank under torchft: per-step quorum, weights of a live group after a restart, no checkpoint.

PURE=1 takes torchft's PureDistributedDataParallel. A step of torchft counts once it is committed.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.ddp import PureDistributedDataParallel

from benchmarks.recovery.ranks.record import Record
from benchmarks.recovery.ranks.workload import LEARNING_RATE, batch, new_network


def main(num_steps: int) -> None:
    """Train until `num_steps` are committed."""
    group, num_groups = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    record, network = Record(group), new_network()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=int(os.environ.get("MIN_GROUPS", "1")),
        load_state_dict=load,
        state_dict=lambda: {"model": network.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"group-{group}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
    )
    wrapper = PureDistributedDataParallel if os.environ.get("PURE") else DistributedDataParallel
    model = wrapper(manager, network)
    optimizer = Optimizer(manager, torch.optim.AdamW(network.parameters(), LEARNING_RATE))
    while manager.current_step() < num_steps:
        optimizer.zero_grad()
        # The quorum may move this group to the step of another.
        manager.wait_quorum()
        step = manager.current_step() + 1
        inputs, targets = batch(step, group, num_groups)
        loss = network.loss(model(inputs), targets)
        record.maybe_die(step)
        loss.backward()
        optimizer.step()
        if manager.current_step() >= step:
            record.step(step, [inputs])
    record.finish(network.parameters())
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
