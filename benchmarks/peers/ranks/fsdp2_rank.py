"""One rank of a plain loop: transformers' Llama under torch's FSDP2.

python -m benchmarks.peers.ranks.fsdp2_rank FOLDER [compiled]

Each layer is a unit, and the whole model is one, as torch's tutorial has it. accelerate cannot do this here: on a CPU
its FSDP2 plugin falls back to DDP (1.15).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.ranks.tokens import build_adamw, rows_of_rank
from benchmarks.peers.ranks.transformers_model import as_batch, load_model
from benchmarks.peers.turns import Turns, read_task


def main() -> None:
    """Train until no turn is left."""
    folder, is_compiled = Path(sys.argv[1]), "compiled" in sys.argv[2:]
    task, turns = read_task(folder), Turns.of_environment()
    dist.init_process_group("gloo")
    model = load_model(folder)
    for layer in model.model.layers:
        if is_compiled:
            layer.compile()
        fully_shard(layer)
    fully_shard(model)
    optimizer = build_adamw(model.parameters(), task)
    for rows in rows_of_rank(folder, task):
        turns.next()
        loss = model(**as_batch(rows)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        turns.loss = total / dist.get_world_size()


if __name__ == "__main__":
    main()
