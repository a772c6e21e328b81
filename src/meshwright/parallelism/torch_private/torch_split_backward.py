"""Backward of a pipeline stage in two parts: to its inputs, which the previous stage waits for, then to its weights.

The split of the autograd graph (Zero Bubble, Qi et al. 2023, arXiv:2401.10241) is torch's stage_backward_input, which
is private. Its stage_backward_weight is not used: of a parameter that is used twice it reads freed tensors (2.15); in
2.11 it also rejects nodes of Python functions, such as compiled and recomputed blocks have, adds up the gradients of
all outputs of a node, and counts twice what such a node passes to another.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils.checkpoint import GraphExecGroup


@dataclass
class PendingWeights:
    """Input of the backward to the weights."""

    output: Tensor
    gradient: Tensor | None
    groups: list[dict[str, Any]] | None
    """What stage_backward_input returned; None for a first stage, whose inputs need no gradient."""
    graph: Any = None
    """Reference that keeps alive the part of the autograd graph that `groups` needs."""


def backward_to_all(output: Tensor | GradientEdge, gradient: Tensor | None) -> None:
    """Run a whole backward; nothing for a first stage below all layers with an adapter, which trains nothing."""
    if isinstance(output, GradientEdge) or output.requires_grad:
        torch.autograd.backward(output, gradient)


def backward_to_inputs(
    output: Tensor, gradient: Tensor | None, received: Tensor | None, stage: nn.Module
) -> PendingWeights:
    """Set the gradient of `received` and return the pending backward to the weights; `gradient` is None for a loss."""
    if received is None:
        return PendingWeights(output, gradient, None)
    gradients = None if gradient is None else [gradient]
    graph = _graph_of(output)
    _, groups = stage_backward_input([output], gradients, [received], iter(_trained(stage)))
    return PendingWeights(output, gradient, groups, graph)


def backward_to_weights(pending: PendingWeights, stage: nn.Module) -> None:
    """Accumulate the gradients of the stage's parameters."""
    if pending.groups is None:
        backward_to_all(pending.output, pending.gradient)
    else:
        _accumulate(pending.groups, _trained(stage))


_LEAVES = ("AccumulateGrad", "autograd::Error")


def is_needed(node: Any, index: int) -> bool:
    """Return whether the backward pass under way asks a Python function's node for the gradient of tensor `index`.

    `needs_input_grad` says only whether some backward may. Private; torch's own nodes ask the engine the same.
    """
    if not node.needs_input_grad[index]:
        return False
    after = node.next_functions[index][0]
    # The engine refuses the question for a leaf, of which AOTAutograd's inputs are one kind.
    return after.name().endswith(_LEAVES) or torch._C._will_engine_execute_node(after)


def _trained(stage: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]


def _graph_of(output: Tensor) -> GradientEdge | None:
    """Return a reference to hold until the second part, since the first detaches the graph from `output`.

    Needed in 2.11, where a reference to a Python function's node does not keep the node's graph alive.
    """
    return None if torch.__version__ >= "2.13" else get_gradient_edge(output)


def _accumulate(groups: Sequence[dict[str, Any]], parameters: Iterable[nn.Parameter]) -> None:
    """Accumulate the gradients of `parameters` from `groups` of stage_backward_input, which are consumed."""
    parameter_of = {get_gradient_edge(parameter).node: parameter for parameter in parameters}
    # For a parameter that is used twice, the path between the two uses passes nodes of other groups.
    is_reread = any(len(group["intermediates"]) > 1 for group in groups)
    # Each group is a separate backward, which would recompute its block again. A recomputation shared by several
    # groups lets each tensor be read once only.
    with nullcontext() if is_reread else GraphExecGroup():
        for group in groups:
            reached = dict(zip(group.pop("intermediates"), group.pop("grads"), strict=True))
            leaves = tuple(group["params"])
            for leaf, gradient in zip(leaves, _gradients(reached, leaves, is_reread=is_reread), strict=True):
                parameter = parameter_of[leaf]
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _gradients(
    reached: dict[Node, tuple[Tensor | None, ...]], leaves: Sequence[Node], *, is_reread: bool
) -> tuple[Tensor, ...]:
    """Return the gradient of each of `leaves`; `reached` are start nodes with the gradients of their outputs."""
    edges, gradients = zip(
        *(
            (GradientEdge(node, index), gradient)
            for node, of_node in reached.items()
            for index, gradient in enumerate(of_node)
            if gradient is not None
        ),
        strict=True,
    )
    # The given gradients are complete: override what flows in from another start node.
    holds = [node.register_prehook(_always(of_node)) for node, of_node in reached.items()]
    ends = tuple(GradientEdge(leaf, 0) for leaf in leaves)
    try:
        # Not torch.autograd.grad, which compares shapes that 2.11 does not know of a Python function's node.
        return _engine_run_backward(edges, gradients, is_reread, False, ends, False, accumulate_grad=False)
    finally:
        for hold in holds:
            hold.remove()


def _always(gradients: tuple[Tensor | None, ...]) -> Any:
    return lambda _: gradients
