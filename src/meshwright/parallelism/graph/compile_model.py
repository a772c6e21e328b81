"""torch.compile of a whole model as one graph, with the collectives of data parallelism in it."""

from torch import nn

from meshwright.models.contract import blocks_of
from meshwright.parallelism.compile_blocks import prepare_compile
from meshwright.parallelism.graph.collective_buckets import Buckets
from meshwright.parallelism.graph.graph_sharded import gathered_elements
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.torch_private.torch_model_graph import compile_with_pass


def compile_model(model: nn.Module, meshes: Meshes) -> None:
    """Compile the only stage of a layout in place; a graph break is an error."""
    layout = meshes.layout
    prepare_compile(layout)
    groups = tuple(meshes.group(axis).group_name for axis in ("fsdp", "dp_replicate") if meshes.degree(axis) > 1)
    if not groups:
        model.compile(backend=layout.compile_backend, fullgraph=True)
        return
    buckets = Buckets(groups, _elements_of_largest_block(model), layout.fsdp, layout.prefetch)
    compile_with_pass(model, layout.compile_backend, buckets)


def _elements_of_largest_block(model: nn.Module) -> int:
    """Return the elements that one rank gathers of the largest block."""
    blocks = [block for block in blocks_of(model) if block is not None] or [model]
    return max(gathered_elements(block) for block in blocks)
