"""FSDP2 and HSDP: parameters, gradients and optimizer state sharded over the data-parallel ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.spec.layout import Layout
from meshwright.spec.sections import DType, PrecisionSection

TORCH_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard_model(
    model: nn.Module, blocks: nn.ModuleList, layout: Layout, precision: PrecisionSection, mesh: DeviceMesh
) -> None:
    """Shard each block, then what is left, over `mesh`; masters stay float32 whatever `precision` says."""
    compute, reduce = TORCH_DTYPES[precision.compute], TORCH_DTYPES[precision.reduce]
    casts = getattr(model, "casts_block_inputs", True)
    block_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=casts)
    root_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    reshard = layout.reshard_after_forward == "always"
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=block_policy, reshard_after_forward=reshard)
    # The root's own parameters (embedding, head) are needed again at once in backward.
    fully_shard(model, mesh=mesh, mp_policy=root_policy, reshard_after_forward=False)


def reshard_model(model: nn.Module) -> None:
    """Free gathered parameters, so that the model holds its shards again: a forward without a backward keeps some."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
