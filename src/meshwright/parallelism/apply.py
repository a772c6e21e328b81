"""The order in which a Layout is applied to a model, on one page.

1. pipeline split          first: what belongs to other stages need not be touched by anything below
2. float8                  (not built yet) a linear layer changes what it multiplies with while it is still whole,
                           so that tensor parallelism splits the layer that will run
3. tensor and sequence     a parameter becomes a DTensor, which says what part of the whole a rank holds; all that
                           follows may cut it further, and could not find the whole again if it came first
4. experts                 after 3, which decides whether the tokens that reach a router are split over tp
5. context                 replaces the core of attention, which has no parameters: after 3, since the heads that
                           it shares out are those that tensor parallelism left to this rank
6. activation checkpoint   what is recomputed is the block with its collectives, so after everything that adds some
7. compile                 after 6: the compiler must see the recompute region to keep it, and the collectives of 3,
                           which it overlaps with matmuls where layout.async_tp asks for it
8. FSDP2 / HSDP            after 7: its gather and reduce hooks stay outside the compiled graph, and it shards what
                           3 and 4 left of each parameter
9. materialise             last: only now does a rank know which part of each tensor is its own, so no rank ever
                           holds the whole model

Each is a file next to this one. Which layouts can be applied at all, spec/job/validity.py says before any process
starts.
"""

from torch import nn

from meshwright.models.contract import blocks_of
from meshwright.parallelism.activation_checkpoint import checkpoint_blocks
from meshwright.parallelism.compile_blocks import compile_blocks
from meshwright.parallelism.context.context import apply_context_parallel
from meshwright.parallelism.data.fully_sharded import shard_model
from meshwright.parallelism.data.materialize import materialize
from meshwright.parallelism.expert.experts import apply_expert_parallel
from meshwright.parallelism.gradients import share_tied
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages, split
from meshwright.parallelism.tensor.async_tensor import apply_async_tensor_parallel
from meshwright.parallelism.tensor.tensor import apply_tensor_parallel
from meshwright.spec.job.sections import PrecisionSection
from meshwright.spec.layout.schedule.schedule import Schedule


def parallelize(
    model: nn.Module, meshes: Meshes, precision: PrecisionSection, schedule: Schedule, *, seq_len: int, seed: int
) -> Stages:
    """Return this rank's part of `model`, which is used up: split as meshes.layout says, with its initial weights."""
    layout = meshes.layout
    stages = split(model, layout, schedule, meshes.rank("pp"))
    apply_async_tensor_parallel(meshes)
    for stage in stages:
        apply_tensor_parallel(stage, meshes)
        apply_expert_parallel(stage, meshes)
        apply_context_parallel(stage, meshes, seq_len)
        blocks = blocks_of(stage)
        tp_group, ep_group = (meshes.group(axis) if meshes.degree(axis) > 1 else None for axis in ("tp", "ep"))
        checkpoint_blocks(blocks, layout, tp_group, ep_group)
        if layout.compile:
            compile_blocks(blocks, layout)
        shard_model(stage, layout, precision, meshes)
        materialize(stage, meshes.device_type, seed, offloads=layout.cpu_offload)
    share_tied(stages, meshes)
    return stages
