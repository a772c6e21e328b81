"""AdamW over sharded parameters, its state by parameter name, and its learning rate."""

import math

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright.errors import ConfigError
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.spec.job.sections import OptimizerSection


def build_optimizer(model: nn.Module, section: OptimizerSection) -> AdamW:
    """Return fused AdamW with weight decay on matrices only, not on norms and biases."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError(
            "the model has no trainable parameters, but the optimizer needs one: assign an nn.Parameter, or modules "
            "that hold some, to the model in its constructor"
        )
    # Biases of experts are vectors, stacked.
    is_matrix = {name: parameter.dim() >= 2 and not name.endswith("bias") for name, parameter in trainable.items()}
    matrices = [parameter for name, parameter in trainable.items() if is_matrix[name]]
    vectors = [parameter for name, parameter in trainable.items() if not is_matrix[name]]
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


def learning_rate(step: int, num_steps: int, optimizer: OptimizerSection) -> float:
    """Return the learning rate of `step` (1 is the first) in a run of `num_steps`.

    Linear warmup to the top, then by schedule: cosine or linear down to min_lr_ratio at the last step,
    wsd (warmup, stable, decay) linear over the last decay_fraction, or constant.
    """
    top = optimizer.learning_rate
    if step <= optimizer.warmup_steps:
        return top * step / optimizer.warmup_steps
    first_decay_step = optimizer.warmup_steps
    if optimizer.schedule == "wsd":
        first_decay_step = max(first_decay_step, num_steps - round(optimizer.decay_fraction * num_steps))
    progress = max(0, step - first_decay_step) / max(1, num_steps - first_decay_step)
    match optimizer.schedule:
        case "constant":
            remaining = 1.0
        case "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
        case "linear" | "wsd":
            remaining = 1 - progress
    return top * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * remaining)
