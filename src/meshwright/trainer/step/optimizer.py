"""AdamW over sharded parameters, and its state by parameter name."""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright.errors import ConfigError
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.spec.job.sections import OptimizerSection


def build_optimizer(model: nn.Module, section: OptimizerSection) -> AdamW:
    """Return fused AdamW with weight decay on matrices only, not on norms and biases."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            "the model has no trainable parameters, but the optimizer needs one: assign an nn.Parameter, or modules "
            "that hold some, to the model in its constructor"
        )
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    vectors = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


def optimizer_state(model: nn.Module, optimizer: AdamW) -> dict[str, dict[str, list[Tensor]]]:
    """Return the optimizer's state tensors by parameter name, zeros before the first step.

    Loading into them in place restores the optimizer. A parameter that several stages on this rank hold has several.
    """
    by_name: dict[str, dict[str, list[Tensor]]] = {}
    for name, parameter in canonical_parameters(model):
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        for key, tensor in state.items():
            by_name.setdefault(name, {}).setdefault(key, []).append(tensor)
    return by_name
