"""torch.compile of a whole model as one graph, with the collectives of data parallelism in it."""

from torch import nn

from meshwright.parallelism.activation_checkpoint import prepare_compile
from meshwright.spec.layout.layout import Layout


def compile_model(model: nn.Module, layout: Layout) -> None:
    """Compile the only stage of a layout in place; a graph break is an error."""
    prepare_compile(layout)
    model.compile(backend=layout.compile_backend, fullgraph=True)
