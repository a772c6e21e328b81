"""Checkpoints in a training loop of your own: FSDP2, saved in the background, resumed on any number of ranks.

torchrun --nproc-per-node 2 examples/own_loop.py runs/mine 10
torchrun --nproc-per-node 4 examples/own_loop.py runs/mine 20    # continues after step 10
"""

import sys

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import meshwright as mw


def main(folder: str, last_step: int) -> None:
    """Train to `last_step` from the newest checkpoint in `folder`."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "samples": 0}

    with mw.CheckpointFolder(folder, keep=2) as checkpoints:
        loaded = checkpoints.load(state)
        for step in range(1 if loaded is None else loaded.step + 1, last_step + 1):
            batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            checkpoints.wait_until_staged()  # before tensors change that a save still copies
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["samples"] += len(batch)
            if step % 5 == 0:
                checkpoints.save(state, step, metadata={"loss": loss.item()}, background=True)
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss.item():.6f}  samples {state['samples']}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
