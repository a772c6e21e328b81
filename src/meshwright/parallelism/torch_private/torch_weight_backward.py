"""The second part of a split backward: from the nodes that the first part passed, on to the parameters next to its way.

torch has one, as private as the first. Of a parameter that is used twice it reads what it has freed (2.15). In 2.11 it
also refuses a node of a Python function, such as compiled and recomputed blocks have, adds up the gradients of all
outputs of a node, and counts twice what one such node passes on to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup


def keep_graph(output: Tensor) -> GradientEdge | None:
    """Return what to hold on to until the second part, when the first has taken the graph away from `output`.

    The node of a Python function that is held does not live on by itself in 2.11, and does in 2.13 and 2.15.
    """
    return None if torch.__version__ >= "2.13" else get_gradient_edge(output)


def add_weight_gradients(groups: Sequence[dict[str, Any]], parameters: Iterable[nn.Parameter]) -> None:
    """Add to the gradients of `parameters` what torch's stage_backward_input left in `groups`, which are used up."""
    parameter_of = {get_gradient_edge(parameter).node: parameter for parameter in parameters}
    # Of a parameter that is used twice, the way from one use to the other passes those of other groups.
    is_reread = any(len(group["intermediates"]) > 1 for group in groups)
    # Each group is a backward of its own, and would recompute its block by itself. Of what is recomputed for several no
    # tensor may be read twice.
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
    """Return the gradient of each of `leaves`, starting from nodes with the gradients that `reached` their outputs."""
    edges, gradients = zip(
        *(
            (GradientEdge(node, index), gradient)
            for node, of_node in reached.items()
            for index, gradient in enumerate(of_node)
            if gradient is not None
        ),
        strict=True,
    )
    # What reached a node is all there is: nothing is added to it on the way from another.
    holds = [node.register_prehook(_always(of_node)) for node, of_node in reached.items()]
    ends = tuple(GradientEdge(leaf, 0) for leaf in leaves)
    try:
        # Not torch.autograd.grad, which first compares shapes with what 2.11 does not know of a Python function's node.
        return _engine_run_backward(edges, gradients, is_reread, False, ends, False, accumulate_grad=False)
    finally:
        for hold in holds:
            hold.remove()


def _always(gradients: tuple[Tensor | None, ...]) -> Any:
    return lambda _: gradients
