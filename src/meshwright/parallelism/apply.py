"""The order in which a Layout is applied to a model, on one page.

    1. activation checkpoint   the block is wrapped while it is still a plain module, so that what is recomputed
                               is exactly what the model's author wrote
    2. compile                 after 1: the compiler must see the recompute region to keep it
    3. FSDP2 / HSDP            after 2: its gather and reduce hooks stay outside the compiled graph, and
                               parameters are sharded by the names they have by then
    4. materialise             last: only now does a rank know which part of each tensor is its own, so no rank
                               ever holds the whole model

Pipeline split, tensor, expert and context parallelism will take their places before 1.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.models.contract import blocks_of
from meshwright.parallelism.activation_checkpoint import checkpoint_blocks
from meshwright.parallelism.compile_blocks import compile_blocks
from meshwright.parallelism.fully_sharded import shard_model
from meshwright.parallelism.materialize import materialize
from meshwright.spec.layout import Layout
from meshwright.spec.sections import PrecisionSection


def parallelize(
    model: nn.Module, layout: Layout, precision: PrecisionSection, mesh: DeviceMesh, *, seed: int
) -> nn.Module:
    """Return `model`, changed in place: split over `mesh` as `layout` says, with its initial weights."""
    blocks = blocks_of(model)
    checkpoint_blocks(blocks, layout.activation_checkpoint)
    if layout.compile:
        compile_blocks(blocks, layout.compile_backend)
    shard_model(model, blocks, layout, precision, mesh)
    materialize(model, mesh.device_type, seed)
    return model
