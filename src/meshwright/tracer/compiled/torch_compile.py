"""torch.compile while a step is traced: Inductor's kernels and collectives are recorded instead of run.

Collectives in compiled graphs, in place where Inductor runs them in place.
Inductor has no out-of-place all-reduce or broadcast. It reuses the input's memory if that has no later reader, in a
pass of compile_fx that `kernels_of` does not run, otherwise a copy, which it fuses like any copy. After this pass each
collective is one library call among the kernels. `require_kernels` checks this: a lost collective would be neither
priced nor compared between ranks.
"""

import functools
import importlib
import operator
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._inductor.fx_passes import reinplace
from torch._ops import OpOverload

from meshwright.errors import UnsupportedError
from meshwright.parallelism.torch_private.torch_compiler import save_meshes_last
from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.torch_patches.torch_names import SUPPORTED, WAITS_FOR_SEVERAL, replace

GRAPH_PASS = "post_grad_custom_post_pass"
ORDER_OPTIONS = ("reorder_for_peak_memory",)
"""Options of Inductor that a recorded graph follows."""


def record_compiled(mode: RecordingMode) -> None:
    """Make modules compiled by Inductor record their kernels."""
    compile_module = nn.Module.compile

    def by_recording(compile_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", "inductor")
            if backend == "aot_eager":
                save_no_random_states()
            if backend == "inductor":
                kwargs["backend"] = recording_compiler(mode, kwargs.get("options") or {})
                # Inductor's other options, none of which changes fusion.
                kwargs = {name: value for name, value in kwargs.items() if name not in ("mode", "options")}
            return compile_(*args, **kwargs)

        return compiled

    def compiled(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **kwargs)
        call: Any = module._compiled_call_impl

        def followed(*args: Any, **kwargs: Any) -> Any:
            # The hooks that follow calls of other modules are compiled away.
            mode.recorder.scopes.enter(module)
            try:
                return call(*args, **kwargs)
            finally:
                mode.recorder.scopes.leave(module)

        module._compiled_call_impl = followed

    torch.compile = by_recording(torch.compile)
    nn.Module.compile = compiled  # type: ignore[method-assign, assignment]


def recording_compiler(mode: RecordingMode, options: Mapping[str, Any] = MappingProxyType({})) -> Callable[..., Any]:
    """Return the backend that records Inductor's kernels; raises UnsupportedError for a torch without its parts.

    Of Inductor's `options` it applies a pass over each graph, and the order of kernels.
    """
    try:
        # Importing the compiler takes seconds, and only compiled jobs need it.
        compiled = importlib.import_module("meshwright.tracer.compiled.compiled_graph")
    except ImportError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} has another compiler than a simulation of compiled blocks supports "
            f"({error}): install {SUPPORTED}, or set layout.compile to false"
        ) from error
    change = options.get(GRAPH_PASS)
    order = tuple((name, value) for name, value in options.items() if name in ORDER_OPTIONS)
    backend: Callable[..., Any] = compiled.recording_backend(mode, change, order)
    return backend


@cache
def save_no_random_states() -> None:
    """Make the graphs of a recomputed block save no RNG states from forward for backward, permanently.

    torch saves and restores them by higher-order operators that run on CPU and CUDA only (2.13: also around attention
    without dropout). They are a few bytes, and fake tensors have no values.
    """
    # Recomputation replaces the same function, once: call it first, so that it does not undo this.
    save_meshes_last()
    # Importing the partitioners takes seconds, and only compiled jobs need them.
    replace(
        importlib.import_module("torch._functorch.partitioners"),
        "functionalize_rng_ops",
        lambda _: lambda _, forward, backward, *__: (forward, backward),
    )


_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_ops, _clone = torch.ops._c10d_functional, torch.ops.aten.clone.default
_IN_PLACE = {
    _ops.all_reduce.default: _ops.all_reduce_.default,
    _ops.all_reduce_coalesced.default: _ops.all_reduce_coalesced_.default,
    _ops.broadcast.default: _ops.broadcast_.default,
}
_SAME_MEMORY = (_ops.wait_tensor.default, *WAITS_FOR_SEVERAL, *_IN_PLACE.values())
"""Return their first argument; where that is a list, a list."""


def is_collective(node: fx.Node) -> bool:
    """Return whether a node is a collective, a message or a wait for one."""
    if not isinstance(node.target, OpOverload) or node.target is _ops._wrap_tensor_autograd.default:
        return False
    return node.target.namespace in _NAMESPACES or node.target is torch.ops._dtensor.shard_dim_alltoall.default


def communicate_in_place(graph: fx.GraphModule) -> None:
    """Have collectives that Inductor runs in place work on memory of their own, copied if it has a later reader."""
    found = [node for node in graph.graph.nodes if node.target in _IN_PLACE]
    if not found:
        return
    free = {name: by for name, by in reinplace.inplaceable_ops.items() if name in _IN_PLACE}
    with (
        mock.patch.object(reinplace, "inplaceable_ops", free),
        mock.patch.object(reinplace, "inplaceable_foreach_ops", {}),
    ):
        reinplace.reinplace_inplaceable_ops_core(graph.graph)
    for node in found:
        if node.target in _IN_PLACE:
            with graph.graph.inserting_before(node):
                node.args = (fx.map_arg(node.args[0], _copied), *node.args[1:])
            node.target = _IN_PLACE[node.target]
    graph.recompile()


def _copied(node: fx.Node) -> fx.Node:
    value = node.meta["val"].clone(memory_format=torch.contiguous_format)
    copy = node.graph.call_function(_clone, (node,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = value
    return copy


def communicated(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory a wait, or an in-place collective, returns; None for other nodes."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and source.target in _SAME_MEMORY:
        source = source.args[0][node.args[1]]
    elif node.target not in _SAME_MEMORY:
        return None
    return source if isinstance(source, fx.Node) else None


def require_kernels(graph: fx.GraphModule, called: Iterable[fx.Node]) -> None:
    """Raise UnsupportedError unless each collective of a graph is among the nodes that are called as operators."""
    kernels = set(called)
    _refuse(node for node in graph.graph.nodes if is_collective(node) and node not in kernels)


def require_recorded(nodes: Iterable[fx.Node], values: Container[fx.Node]) -> None:
    """Raise UnsupportedError if a collective among `nodes`, which are to be called, has a value, as part of a kernel
    that was recorded without it.
    """
    _refuse(node for node in nodes if is_collective(node) and node in values)


def _refuse(lost: Iterable[fx.Node]) -> None:
    for node in lost:
        raise UnsupportedError(
            f"torch.compile: torch {torch.__version__} compiles {node.target} to a kernel that a simulation does not "
            'support: call it outside of the compiled module, or compile with backend="aot_eager"'
        )
