"""The order in which a Layout is applied to a model.

1. pipeline split          first, so that nothing below touches modules of other stages
2. float8                  replaces whole linear layers, before tensor parallelism shards them
3. tensor and sequence     parameters become DTensors, which record their placement; later steps shard them further
4. experts                 after 3, which decides whether a router's tokens are sharded over tp
5. attention, context      replace the attention core, which has no parameters: by its backend, then by one that
                           shares the sequence; after 3, since Ulysses shards the heads of this rank
6. activation checkpoint   after all steps that add collectives to a block: they are part of its recomputation
7. compile                 after 6 and 3: the compiler must see the recomputed region, and the collectives that it
                           overlaps with matmuls (layout.async_tp)
8. activation offload      after 6 and 7: it moves what recomputed and compiled blocks save
9. FSDP2 / HSDP            after 7, so that its hooks stay outside of compiled graphs; shards what 3 and 4 left. In a
                           model that is one graph sharding comes before 7, since its collectives are in the graph;
                           so it does for CUDA graphs, which the host's part of FSDP2's hooks is no part of. What
                           no rank shares and nothing casts needs none of it on a processor: replica_sums.py

Memory and initial weights come afterwards (data/materialize.py), when each rank knows its shards: none ever holds the
whole model.

spec/job/validity.py rejects invalid layouts before any process starts.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import UnsupportedError
from meshwright.models.attention.attention_choice import apply_attention_backend
from meshwright.models.contract import blocks_of
from meshwright.parallelism.activation_checkpoint import checkpoint_blocks
from meshwright.parallelism.activation_offload import HostTransfers, offload_blocks
from meshwright.parallelism.compile_blocks import compile_blocks
from meshwright.parallelism.context.context_parallel import apply_context_parallel
from meshwright.parallelism.data.fully_sharded import shard_model
from meshwright.parallelism.data.replica_sums import needs_no_sharding, replicate_model
from meshwright.parallelism.expert.expert_parallel import apply_expert_parallel
from meshwright.parallelism.float8.convert_linears import convert_linears, set_shard_groups
from meshwright.parallelism.graph.compile_model import compile_model
from meshwright.parallelism.graph.cuda_graph import shards_for_graphs
from meshwright.parallelism.graph.graph_sharded import shard_in_graph
from meshwright.parallelism.head import require_separable
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages, split
from meshwright.parallelism.tensor.tensor_parallel import apply_async_tensor_parallel, apply_tensor_parallel
from meshwright.parallelism.torch_private.torch_fsdp import complete_reductions
from meshwright.spec.job.sections import PrecisionSection
from meshwright.spec.layout.schedule.schedule import Schedule


def parallelize(
    model: nn.Module, meshes: Meshes, precision: PrecisionSection, schedule: Schedule, seq_len: int
) -> Stages:
    """Return this rank's stages of `model`, parallelized by meshes.layout; consumes `model`."""
    layout = meshes.layout
    require_separable(model, layout.loss_chunks)
    if layout.activation_offload and not len(blocks_of(model)):
        raise UnsupportedError(
            f"layout.activation_offload = true moves what each block saves, but {type(model).__name__} has no blocks: "
            "make its repeated modules an nn.ModuleList called blocks, or set layout.activation_offload to false"
        )
    transfers = HostTransfers(torch.device(meshes.device_type)) if layout.activation_offload else None
    stages = split(model, layout, schedule, meshes.rank("pp"))
    stages.float8 = convert_linears(list(stages), meshes, precision)
    apply_async_tensor_parallel(meshes)
    for stage in stages:
        apply_tensor_parallel(stage, meshes)
        set_shard_groups(stage, meshes)
        apply_expert_parallel(stage, meshes)
        apply_attention_backend(stage, layout.attention_backend)
        apply_context_parallel(stage, meshes, seq_len)
        blocks = blocks_of(stage)
        gathered_again = ("tp", "ep", "fsdp") if layout.compile == "model" and layout.is_resharded else ("tp", "ep")
        checkpoint_blocks(
            blocks, layout, *(meshes.group(axis) if meshes.degree(axis) > 1 else None for axis in gathered_again)
        )
        if layout.compile == "model" or shards_for_graphs(meshes):
            # One graph serves all microbatches, and only the last one's gradients are to be summed over replicas.
            stages.sums_replicas_after = schedule.num_microbatches > 1
            shard_in_graph(stage, precision, meshes, sums_replicas=not stages.sums_replicas_after)
            if layout.compile == "model":
                compile_model(stage, meshes)
            elif layout.compile:
                compile_blocks(blocks, layout)
        else:
            if layout.compile:
                compile_blocks(blocks, layout)
            if transfers is not None:
                offload_blocks(blocks, transfers, has_last=stage is stages.last)
            if needs_no_sharding(stage, layout, precision, meshes.device_type):
                stages.replica_sums = replicate_model(stage, meshes)
            else:
                shard_model(stage, layout, precision, meshes)
                assert isinstance(stage, FSDPModule)
                complete_reductions(stage, stages.missing.add)
    return stages
