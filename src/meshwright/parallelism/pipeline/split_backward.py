"""The backward of a stage in two parts: to its inputs, which the stage before waits for, and to its weights, later.

The split of the autograd graph is torch's own (Zero Bubble, Qi et al. 2023, arXiv:2401.10241), which it keeps private.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from meshwright.parallelism.torch_private.torch_weight_backward import add_weight_gradients, keep_graph


@dataclass
class PendingWeights:
    """What the backward to the weights starts from."""

    output: Tensor
    gradient: Tensor | None
    groups: list[dict[str, Any]] | None
    """None where nothing was computed yet: a first stage has no inputs that want a gradient."""
    graph: Any = None
    """What keeps alive the part of the autograd graph that `groups` needs."""


def backward_to_inputs(
    output: Tensor, gradient: Tensor | None, received: Tensor | None, stage: nn.Module
) -> PendingWeights:
    """Return what is left to do, after writing the gradient of `received` into it; `gradient` is None for a loss."""
    if received is None:
        return PendingWeights(output, gradient, None)
    gradients = None if gradient is None else [gradient]
    graph = keep_graph(output)
    _, groups = stage_backward_input([output], gradients, [received], iter(_trained(stage)))
    return PendingWeights(output, gradient, groups, graph)


def backward_to_weights(pending: PendingWeights, stage: nn.Module) -> None:
    """Add the gradients of the stage's parameters to what they hold."""
    if pending.groups is None:
        torch.autograd.backward(pending.output, pending.gradient)
    else:
        add_weight_gradients(pending.groups, _trained(stage))


def _trained(stage: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if parameter.requires_grad]
