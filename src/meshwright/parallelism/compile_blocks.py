"""torch.compile block by block: one graph serves all blocks, so the cold start does not grow with depth."""

from torch import nn

from meshwright.spec.layout import CompileBackend


def compile_blocks(blocks: nn.ModuleList, backend: CompileBackend) -> None:
    """Compile each block in place; a graph break is an error, since it would silently cost the speed asked for."""
    for block in blocks:
        block.compile(backend=backend, fullgraph=True)
