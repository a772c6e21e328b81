"""place_in_pools: a rank's stages with embeddings and communication buffers in the pools that [memory] names."""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.memory.managed_pool import ManagedPool
from meshwright.memory.memory_pools import MemoryPools
from meshwright.models.contract import blocks_of
from meshwright.parallelism.expert.expert_parallel import have_own_ranks
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_fsdp import move_shard, use_communication_pool


def place_in_pools(stages: Stages, pools: MemoryPools, meshes: Meshes) -> None:
    """Move the embeddings of `stages` and set the allocator of FSDP2's buffers, before the first step; a collective.

    Raises UnsupportedError where this torch has no such allocator.
    """
    stages.pools = pools
    if pools.communication != "device":
        _make_communicators(meshes, pools.device)
    for stage in stages:
        if pools.embedding is not None:
            _move_embeddings(stage, pools.embedding)
        if pools.communication != "device":
            for unit in stage.modules():
                if isinstance(unit, FSDPModule):
                    use_communication_pool(unit, pools.communication)


def _make_communicators(meshes: Meshes, device: torch.device) -> None:
    """Let the groups that FSDP2 shards over make their communicators, with which their pools register memory.

    torch makes one at a group's first collective, and the first buffer is allocated before that.
    """
    axes = ("fsdp", "expert_dp_shard") if have_own_ranks(meshes.layout) else ("fsdp",)
    for axis in axes:
        dist.all_reduce(torch.zeros(1, device=device), group=meshes.group(axis))


@torch.no_grad()
def _move_embeddings(stage: nn.Module, pool: ManagedPool) -> None:
    """Move the parameters of the embeddings outside of blocks."""
    in_blocks = set(blocks_of(stage).modules())
    found = [module for module in stage.modules() if isinstance(module, nn.Embedding) and module not in in_blocks]
    for parameter in dict.fromkeys(one for module in found for one in module.parameters(recurse=False)):
        if isinstance(stage, FSDPModule):
            move_shard(stage, parameter, pool.empty_like)
        else:
            pool.move(parameter)
