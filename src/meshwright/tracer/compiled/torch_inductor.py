"""kernels_of(): the kernels that torch.compile would make of a graph, without a device or code generation.

Inductor lowers and fuses the graph by its rules for CUDA, as for an H100, and stops before code generation. Private
parts of torch; checked in 2.11 to 2.15, whose rules differ. Ignored: passes that compile_fx runs before and after
(pattern matching, async TP), autotuning, memory planning.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._guards import detect_fake_mode
from torch._inductor.codegen.common import (
    DeviceOpOverrides,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler
from torch._inductor.utils import GPU_TYPES
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.tracer.compiled.kernel_bytes import kernel_bytes
from meshwright.tracer.compiled.torch_compile import communicated, is_collective, require_kernels
from meshwright.tracer.record.simulated_device import H100, always
from meshwright.tracer.torch_patches.torch_names import replace as replace_name


@dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled graph."""

    nodes: tuple[fx.Node, ...]
    """The nodes that it computes, in the graph's order."""
    results: tuple[fx.Node, ...]
    """Those whose values it writes to memory."""
    is_fused: bool
    """Whether the compiler generates it; others are library operators, as in eager code."""
    moved_bytes: int
    """Read and written; 0 if it is not fused."""
    in_place: Mapping[fx.Node, fx.Node]
    """Results that overwrite another node's value, and that node."""


def register_device(device_type: str) -> None:
    """Make Inductor treat a device type as a GPU with Triton, permanently."""
    register_backend_for_device(device_type, TritonScheduling, PythonWrapperCodegen)
    register_interface_for_device(device_type, _Interface)
    register_device_op_overrides(device_type, DeviceOpOverrides())
    GPU_TYPES.append(device_type)

    def without_triton(create: Callable[..., Any]) -> Callable[..., Any]:
        """Torch would check for Triton first."""

        def created(scheduler: Scheduler, device: torch.device) -> Any:
            return TritonScheduling(scheduler) if device.type == device_type else create(scheduler, device)

        return created

    replace_name(Scheduler, "create_backend", without_triton)

    def without_modes(compile_frame: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo disables all modes while it compiles, except for graphs split at DDP buckets."""

        def compiled(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return compile_frame(*args, **kwargs)

        return compiled

    replace_name(CatchErrorsWrapper, "__call__", without_modes)


def draw_by_seeds(graph: fx.GraphModule) -> None:
    """Make a graph draw random numbers from seeds, as Inductor's kernels do, so that backward can repeat them."""
    with V.set_fake_mode(detect_fake_mode([node.meta.get("val") for node in graph.graph.nodes])):
        replace_random_passes(graph)
    graph.recompile()


def kernels_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Kernel]:
    """Return the kernels in execution order; views have none."""
    lowering = GraphLowering(graph, example_inputs=inputs)
    fake_mode = detect_fake_mode(inputs)
    with V.set_fake_mode(fake_mode), V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
        lowering.run(*inputs)
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        # Lowering works on a copy of the graph, whose nodes have the same names.
        names = {node.name: node for node in graph.graph.nodes}
        steps = [one for one in lowering.scheduler.nodes if not isinstance(one, NopKernelSchedulerNode)]
        written = [_results(step, names) for step in steps]
        in_place = _move_to_last_writer(steps, written, names)
        memory = set().union(*written)
        done = {node for node in names.values() if node.op == "placeholder"}
        kernels = []
        for step, own in zip(steps, written, strict=True):
            kernel = _kernel(step, own or _guess(step, memory, done, names), memory - own, names)
            bases = {node: base for node, base in in_place.items() if node in own and kernel.is_fused}
            kernels.append(replace(kernel, in_place=bases))
            done |= own
    require_kernels(graph, (node for kernel in kernels if not kernel.is_fused for node in kernel.nodes))
    return kernels


def _move_to_last_writer(
    steps: Sequence[BaseSchedulerNode], written: Sequence[set[fx.Node]], names: dict[str, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Move each node of `written` whose memory a later step mutates, such as a scatter's, to that step.

    Return by node the node that the first step computes instead: its first argument.
    """
    last_writer = {
        buffer: number
        for number, step in enumerate(steps)
        if not any(is_collective(node) for node in written[number])
        for output in step.get_outputs()
        for buffer in output.get_mutations()
    }
    bases = {}
    for number, step in enumerate(steps):
        for output in step.get_outputs():
            origin, later = output.node.get_origin_node(), last_writer.get(output.get_name(), number)
            node = None if origin is None else names[origin.name]
            if node is None or later == number or node not in written[number]:
                continue
            writer = _without_views(node)
            written[number] -= {node, writer}
            written[later] |= {node, writer}
            base = writer.args[0]
            if isinstance(base, fx.Node) and base.op == "call_function" and not any(base in own for own in written):
                written[number].add(base)
                bases[writer] = base
    return bases


def _without_views(node: fx.Node) -> fx.Node:
    """Return the node that `node` is a view of, or itself."""
    while isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _kernel(step: BaseSchedulerNode, own: set[fx.Node], others: set[fx.Node], names: dict[str, fx.Node]) -> Kernel:
    """Return a step as a kernel that writes `own`, where other kernels write `others`."""
    results = _in_order(own, names)
    if isinstance(step, ExternKernelSchedulerNode):
        return Kernel(nodes=results, results=results, is_fused=False, moved_bytes=0, in_place={})
    origins = _origins(step, names) - others
    # Inductor also lists operators that only read the step's results.
    computed = needed_by(results, lambda node: node in own or node in origins)
    nodes = _in_order(computed & (origins | own), names)
    return Kernel(nodes=nodes, results=results, is_fused=True, moved_bytes=kernel_bytes(step), in_place={})


def _guess(
    step: BaseSchedulerNode, memory: set[fx.Node], done: set[fx.Node], names: dict[str, fx.Node]
) -> set[fx.Node]:
    """Return the node that a step most likely writes, if Inductor does not report it: a copy in another layout, or
    part of a reduction. It is the last one that can be computed by then; empty if there is none.
    """
    origins = _in_order(_origins(step, names) - memory, names)
    needed = {node: needed_by([node], lambda one: one not in memory) & (memory | done) for node in origins}
    return set([node for node in origins if needed[node] <= done][-1:])


def needed_by(nodes: Iterable[fx.Node], goes_on: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return `nodes` and their transitive inputs, up to nodes for which `goes_on` is False."""
    waiting, found = list(nodes), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes if goes_on(node) else []
    return found


def _origins(step: BaseSchedulerNode, names: dict[str, fx.Node]) -> set[fx.Node]:
    """Return the nodes from which a step originates."""
    found = {names[one.name] for part in step.get_nodes() for one in part.node.get_origins()}  # type: ignore[union-attr]
    return {one for one in found if one.op == "call_function"}


def _results(step: BaseSchedulerNode, names: dict[str, fx.Node]) -> set[fx.Node]:
    """Return the nodes whose values a step writes to memory, if Inductor reports them."""
    operator = getattr(step.node, "op_overload", None)
    # A library operator may have several results, or none: attention, collectives and their waits.
    called = {one for one in _origins(step, names) if operator is not None and one.target is operator}
    if called:
        return called
    origins = (output.node.get_origin_node() for output in step.get_outputs())
    is_called = isinstance(step, ExternKernelSchedulerNode)
    made = (_maker(names[one.name], through_views=is_called) for one in origins if one is not None)
    return {node for node in made if node.op == "call_function"}


def _maker(node: fx.Node, *, through_views: bool) -> fx.Node:
    """Return the node that a kernel computes; Inductor reports the last node with its memory: an in-place collective, a
    wait, or a view of the same shape.
    """
    found = node
    while True:
        if (source := communicated(node)) is not None:
            found = node = source
        elif isinstance(node.target, OpOverload) and node.target.is_view:
            node = node.all_input_nodes[0]
            found = node if through_views else found
        else:
            return found


def _in_order(nodes: set[fx.Node], names: dict[str, fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(node for node in names.values() if node in nodes)


class _Interface(DeviceInterface):
    """The device interface of torch's compiler."""

    class Worker:
        """The same for compile workers."""

        current_device = staticmethod(always(0))
        get_device_properties = staticmethod(always(H100))

    current_device = staticmethod(always(0))
    device_count = staticmethod(always(1))
    is_available = staticmethod(always(value=True))
    get_compute_capability = staticmethod(always("90"))
    get_device_properties = staticmethod(always(H100))
    is_bf16_supported = staticmethod(always(value=True))
    synchronize = staticmethod(always(None))
