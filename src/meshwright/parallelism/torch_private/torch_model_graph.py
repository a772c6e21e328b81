"""torch.compile with a pass over the graphs that it makes, forward and backward; private, checked in 2.13."""

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass

from meshwright.spec.layout.compile_value import CompileBackend

GraphPass = Callable[[fx.Graph], None]
"""Changes a graph in place."""


def compile_with_pass(model: nn.Module, backend: CompileBackend, change: GraphPass) -> None:
    """Compile `model` in place as one graph, whose forward and backward `change` has changed."""
    if backend == "inductor":
        model.compile(backend=backend, fullgraph=True, options=inductor_options(change))
    else:
        model.compile(backend=_unfused(change) if backend == "aot_eager" else backend, fullgraph=True)


def inductor_options(change: GraphPass) -> dict[str, Any]:
    """Return Inductor's options that run `change`, and keep the order that it gives to a graph."""
    return {"post_grad_custom_post_pass": _Pass(change), "reorder_for_peak_memory": False}


def _unfused(change: GraphPass) -> Callable[..., Any]:
    """Return a backend that runs the changed graphs operator by operator, saving what Inductor would save."""

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        change(graph.graph)
        graph.recompile()
        boxed: Callable[..., Any] = torch._dynamo.backends.debugging.boxed_nop(graph, inputs)
        return boxed

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=min_cut_rematerialization_partition
    )
    return backend


class _Pass(CustomGraphPass):
    """A pass that Inductor's cache of compiled graphs distinguishes from others."""

    def __init__(self, change: GraphPass) -> None:
        """`change` is an object whose class is defined in a folder of what the pass is made of."""
        self._change = change
        files = sorted(Path(inspect.getfile(type(change))).parent.glob("*.py"))
        self._uuid = hashlib.sha256(repr(change).encode() + b"".join(file.read_bytes() for file in files)).hexdigest()

    def __call__(self, graph: fx.Graph) -> None:
        self._change(graph)

    def uuid(self) -> str:
        """Return what differs where the pass does."""
        return self._uuid
