"""Compiled blocks under the tracer: the graphs of torch.compile run on fake tensors, one record for each kernel.

A fused kernel of Inductor reads its inputs once and writes its results once, and so does its record. The partitioner of
a real run decides what is saved for backward. Matmuls, attention and collectives in a graph are recorded as operators,
as in eager code. Equal calls are recorded by replay (graph_replay.py).
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload

from meshwright.parallelism.torch_private.torch_dispatch import shape_of, tensors_in
from meshwright.spec.trace.trace import Signature
from meshwright.tracer.compiled.graph_replay import Capture, GraphCall, key_of
from meshwright.tracer.compiled.torch_compile import communicate_in_place, require_recorded, save_no_random_states
from meshwright.tracer.compiled.torch_inductor import Kernel, draw_by_seeds, kernels_of, needed_by, register_device
from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.record.simulated_device import NAME
from meshwright.tracer.torch_distributed.torch_async_tensor import join_matmuls

_FUSED = "inductor.fused"
MAX_CAPTURES = 3
"""Maximum of captured calls of one kind: the first can differ from later ones, as in the first step."""


@cache
def recording_backend(
    mode: RecordingMode, change: Callable[[fx.Graph], None] | None = None, order: tuple[tuple[str, Any], ...] = ()
) -> Callable[..., Any]:
    """Return a backend for torch.compile that saves what Inductor saves for backward, and records its kernels.

    `change` is a pass over each graph, `order` options of Inductor by which kernels follow each other.
    """
    # Before the first graph is compiled.
    save_no_random_states()
    if mode.device_type == NAME:
        register_device(NAME)

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with mode.recorder.paused():
            join_matmuls(graph)
            draw_by_seeds(graph)
            if change is not None:
                change(graph.graph)
                graph.recompile()
            communicate_in_place(graph)
            with torch._inductor.config.patch(dict(order)):
                return CompiledGraph(graph, kernels_of(graph, inputs), mode)

    def partition(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        draw_by_seeds(graph)
        return min_cut_rematerialization_partition(graph, *args, **kwargs)

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        # As Inductor has it: a kernel writes what a graph changes in place.
        keep_inference_input_mutations=True,
    )
    return backend


class CompiledGraph:
    """A callable that runs a compiled graph kernel by kernel."""

    def __init__(self, graph: fx.GraphModule, kernels: Sequence[Kernel], mode: RecordingMode) -> None:
        self._graph, self._kernels, self._mode = graph, kernels, mode
        self._inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._of_backward = _of_backward(graph)
        self._output = next(node for node in graph.graph.nodes if node.op == "output")
        self._free_after = self._last_uses()
        self._signatures: dict[int, Signature] = {}
        self._results = {node for kernel in kernels for node in kernel.results}
        self._calls: dict[Hashable, GraphCall] = {}
        self._num_captures = Counter[Hashable]()
        # torch then passes the arguments in a list that the callee empties, so that they can be freed early.
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        """Return the graph's results; empties `args`."""
        key = None if self._mode.recorder.is_paused else key_of(args, self._mode)
        inputs, call = list(args), self._calls.get(key)
        args.clear()
        if call is not None:
            values = call.replay(self._mode, inputs)
            values |= dict(zip(self._inputs, inputs, strict=True))
            return self._outputs(values)
        values = dict(zip(self._inputs, inputs, strict=True))
        is_captured = key is not None and self._num_captures[key] < MAX_CAPTURES
        capture = Capture(self._mode, inputs) if is_captured else None
        inputs.clear()
        outputs = self._run(values, capture)
        if capture is not None:
            kept = capture.kept(values, self._results)
            values.clear()
            self._num_captures[key] += 1
            found = capture.finish(kept)
            if found is not None:
                self._calls[key] = found
        return outputs

    def _run(self, values: dict[fx.Node, Any], capture: Capture | None) -> Any:
        """Run the kernels in order; `values` has the graph's inputs at first, and its live values at the end."""
        for number, kernel in enumerate(self._kernels):
            # In a backward graph these are recomputed kernels.
            is_forward = bool(kernel.nodes) and self._of_backward.isdisjoint(kernel.nodes)
            self._mode.recorder.scopes.is_compiled_forward = is_forward
            if kernel.is_fused:
                self._run_fused(number, kernel, values)
            else:
                require_recorded(kernel.nodes, values)
                for node in kernel.nodes:
                    self._value(node, values)
            self._mode.recorder.scopes.is_compiled_forward = False
            for node in self._free_after[number]:
                values.pop(node, None)
            if capture is not None:
                capture.after_kernel(values, is_forward=is_forward)
        return self._outputs(values)

    def _outputs(self, values: dict[fx.Node, Any]) -> Any:
        return fx.map_arg(self._output.args[0], lambda node: self._quietly(node, values))

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Return a node's value, computing it and its inputs if necessary."""
        if node not in values:
            needed = {one: self._quietly(one, values) for one in node.all_input_nodes}
            args, kwargs = (fx.map_arg(part, needed.__getitem__) for part in (node.args, node.kwargs))
            values[node] = self._call(node, args, kwargs)
        return values[node]

    def _quietly(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Return a node's value without recording: a node not yet run is a view, or fused into its reader."""
        with self._mode.recorder.paused():
            return self._value(node, values)

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "get_attr":
            return getattr(self._graph, str(node.target))
        assert callable(node.target), node
        return node.target(*args, **kwargs)

    def _run_fused(self, number: int, kernel: Kernel, values: dict[fx.Node, Any]) -> None:
        own = set(kernel.nodes)
        reads = dict.fromkeys(one for node in kernel.nodes for one in node.all_input_nodes if one not in own)
        inputs = tensors_in([self._quietly(node, values) for node in reads])
        written_before = own.intersection(values)
        for node in kernel.results:
            if node in kernel.in_place:
                values[node] = self._quietly(kernel.in_place[node], values)
            elif node not in values:
                values[node] = self._empty_like(node) if _is_new(node) else self._quietly(node, values)
        outputs = tensors_in([values[node] for node in kernel.results])
        if number not in self._signatures:
            self._signatures[number] = _signature(kernel, outputs)
        self._mode.kernel(self._signatures[number], inputs, outputs)
        # Other nodes stay in registers, except those that an earlier kernel wrote, which later kernels may read.
        for node in own.difference(kernel.results, written_before):
            values.pop(node, None)

    def _empty_like(self, node: fx.Node) -> Tensor:
        """Return an empty tensor like a node's value, without computing the fused nodes before it."""
        value = node.meta["val"]
        with self._mode.recorder.paused():
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)

    def _last_uses(self) -> list[list[fx.Node]]:
        """Return for each kernel the nodes that no later kernel reads, directly or through nodes without a kernel."""
        has_memory = {node for kernel in self._kernels for node in kernel.results}.union(self._inputs)
        last: dict[fx.Node, int] = {}
        for number, kernel in enumerate(self._kernels):
            inputs = (one for node in kernel.nodes for one in node.all_input_nodes)
            read = needed_by(inputs, lambda node: node not in has_memory)
            last |= dict.fromkeys((*kernel.nodes, *read), number)
        kept = needed_by(self._output.all_input_nodes, lambda node: node not in has_memory)
        freed: list[list[fx.Node]] = [[] for _ in self._kernels]
        for node, number in last.items():
            if node not in kept:
                freed[number].append(node)
        return freed


def _of_backward(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes computed from the gradients of the graph's outputs (tangents), and those that only its backward
    has, whatever they are computed from.

    The partitioner's own tags miss the backwards of autograd functions, such as those of collectives. What has no input
    and is read by these alone, such as the zeros that an embedding's gradient is added to, is theirs.
    """
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.name) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    made = [node for node in graph.graph.nodes if node.op == "call_function" and not node.all_input_nodes]
    found |= {node for node in made if node.users and found.issuperset(node.users)}
    return found | _gathered_parameters(graph) | _casts_of_backward(graph, found) if found else found


def _casts_of_backward(graph: fx.GraphModule, of_gradients: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes by which a backward rounds what forward saved, such as an input along the dim that its product
    sums (float8 by rows), and those read by these alone, unless a checkpoint recomputes them.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        is_read = bool(node.users) and found.issuperset(node.users) and "recompute" not in node.meta
        if node.op == "call_function" and (node.meta.get("partitioner_tag") == "is_backward" or is_read):
            found.add(node)
    return found - of_gradients


_MOVES = frozenset(
    ("_to_copy", "cat", "clone", "convert_element_type", "copy", "empty", "getitem", "split_with_sizes", "wait_tensor")
)
"""Operators that only move what they are given, next to views and all-gathers."""


def _gathered_parameters(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that only gather inputs of the model, its shards of parameters, and copy them: FSDP's work, not
    that of a recomputed forward.
    """
    moved, gathered = set[fx.Node](), set[fx.Node]()
    for node in graph.graph.nodes:
        name = str(getattr(node.target, "_opname", getattr(node.target, "__name__", "")))
        is_view = isinstance(node.target, OpOverload) and node.target.is_view
        if node.op == "placeholder" and node.name.startswith("primals"):
            moved.add(node)
        elif node.op != "call_function" or not moved.issuperset(node.all_input_nodes):
            continue
        elif "all_gather" in name or name in _MOVES or is_view:
            moved.add(node)
            if "all_gather" in name or not gathered.isdisjoint(node.all_input_nodes):
                gathered.add(node)
    for node in reversed(graph.graph.nodes):
        # Casts of a shard before it is gathered.
        if node in moved and node.op == "call_function" and node.users and gathered.issuperset(node.users):
            gathered.add(node)
    return gathered


def _is_new(node: fx.Node) -> bool:
    """Return whether a node's value is a tensor of known size in memory of its own."""
    operator, value = node.target, node.meta.get("val")
    if not isinstance(operator, OpOverload) or operator.is_view or operator._schema.is_mutable:
        return False
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.size())


def _signature(kernel: Kernel, outputs: list[Tensor]) -> Signature:
    names = (getattr(node.target, "_opname", str(node.target)) for node in kernel.nodes)
    # Of several kernels that write a concatenation, each writes a part.
    written = min(sum(tensor.nbytes for tensor in outputs), kernel.moved_bytes)
    return Signature(
        op=f"{_FUSED}({', '.join(dict.fromkeys(names))})",
        inputs=(),
        outputs=tuple(shape_of(tensor) for tensor in outputs),
        read_bytes=kernel.moved_bytes - written,
        written_bytes=written,
    )
