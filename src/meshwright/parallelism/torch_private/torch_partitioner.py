"""Compiled recomputation of what is random, next to DTensors: an order that torch gets wrong, set right.

A compiled forward hands its backward tensors first, then the meshes of its DTensors. To draw the same numbers again, a
recomputed block on a CPU hands over the random generator's states too, and torch puts these behind the meshes: what it
then reads as its last tensor is a mesh, an AssertionError. In 2.11 graphs hold no meshes, so nothing is moved. In 2.13
attention counts as random even without dropout, in 2.15 only what draws.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx
from torch._functorch import partitioners
from torch._library.fake_class_registry import FakeScriptObject

_functionalize: Any = partitioners.functionalize_rng_ops


@cache
def save_meshes_last() -> None:
    """Have what is compiled from now on in this process hand random states to backward before meshes.

    Once: a rank compiles each of its stages, and a tracer that replaces the same function does so after the first.
    """
    partitioners.functionalize_rng_ops = _with_meshes_last


def _with_meshes_last(
    joint_module: fx.GraphModule, fw_module: fx.GraphModule, bw_module: fx.GraphModule, num_sym_nodes: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return torch's forward and backward, with the random states before the meshes in both."""
    num_outputs, inputs = len(_output(fw_module).args[0]), _inputs(bw_module)
    forward, backward = _functionalize(joint_module, fw_module, bw_module, num_sym_nodes)
    num_states = len(_output(forward).args[0]) - num_outputs
    if num_states:
        _move_outputs(forward, num_states, num_sym_nodes)
        _move_inputs(backward, set(inputs))
    return forward, backward


def _move_outputs(forward: fx.GraphModule, num_states: int, num_sym_nodes: int) -> None:
    """Put the states, which are last but for `num_sym_nodes` numbers, before the meshes before them."""
    output = _output(forward)
    outputs = list(output.args[0])
    end = len(outputs) - num_sym_nodes
    first_state = first_mesh = end - num_states
    while first_mesh and _is_mesh(outputs[first_mesh - 1]):
        first_mesh -= 1
    outputs[first_mesh:end] = [*outputs[first_state:end], *outputs[first_mesh:first_state]]
    output.args = (tuple(outputs),)
    forward.recompile()


def _move_inputs(backward: fx.GraphModule, old: set[fx.Node]) -> None:
    """Put the meshes that come before the states, which are the inputs that are not `old`, after them."""
    inputs = _inputs(backward)
    states = [node for node in inputs if node not in old]
    for mesh in filter(_is_mesh, reversed(inputs[: inputs.index(states[0])])):
        states[-1].append(mesh)
    backward.recompile()


def _output(module: fx.GraphModule) -> Any:
    return next(iter(module.graph.find_nodes(op="output")))


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _is_mesh(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), FakeScriptObject)
