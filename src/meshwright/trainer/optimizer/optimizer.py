"""The optimizer of a rank's parameters, its state by parameter name, and its learning rate."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from meshwright.memory.managed_pool import ManagedPool
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.parallelism.torch_private.torch_dispatch import tensors_in
from meshwright.spec.job.sections import OptimizerSection
from meshwright.trainer.optimizer.bfloat16_adamw import Bfloat16AdamW
from meshwright.trainer.optimizer.compiled_adamw import CompiledAdamW
from meshwright.trainer.optimizer.int8_adamw import Int8AdamW
from meshwright.trainer.optimizer.muon import Muon
from meshwright.trainer.optimizer.update_groups import update_groups

_Part: TypeAlias = AdamW | Bfloat16AdamW | CompiledAdamW | Int8AdamW | Muon
_Build: TypeAlias = Callable[[list[dict[str, Any]], Mapping[nn.Parameter, str], OptimizerSection], _Part]


class ModelOptimizer:
    """Optimizers that together update all parameters."""

    def __init__(self, optimizers: Sequence[_Part]) -> None:
        self._of_parameter = {each: optimizer for optimizer in optimizers for each in _parameters_of(optimizer)}
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of each group: its share of `rate`."""
        for group in self.param_groups:
            own = rate * group["learning_rate_ratio"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own)
            else:
                group["lr"] = own

    def step(self, scale: Tensor | None = None) -> None:
        """Update all parameters from their gradients times `scale`, which CompiledAdamW takes; a collective with Muon.

        None is 1.
        """
        for optimizer in self._optimizers:
            if isinstance(optimizer, CompiledAdamW):
                optimizer.step(scale)
            else:
                assert scale is None, f"{type(optimizer).__name__} takes gradients as they are"
                optimizer.step()

    def step_of(self, parameter: nn.Parameter) -> None:
        """Update one parameter, which has an optimizer of its own."""
        self._of_parameter[parameter].step()

    def zero_grad(self) -> None:
        """Free the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def state_of(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Return the state tensors of a parameter, zeros before the first step."""
        optimizer = self._of_parameter[parameter]
        if isinstance(optimizer, Int8AdamW):
            return optimizer.saved_state(parameter)
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = _initial_state(optimizer, parameter)
        state: dict[str, Tensor] = optimizer.state[parameter]
        return state

    def move_states(self, pool: ManagedPool) -> None:
        """Move the states of all parameters into `pool`, zeros before the first step, but for counts of steps."""
        for parameter in self._of_parameter:
            state = self._of_parameter[parameter].state[parameter] if self.state_of(parameter) else {}
            for name, tensor in state.items():
                if tensor.dim():
                    state[name] = pool.move(tensor)

    @property
    def state_tensors(self) -> list[Tensor]:
        """Return the state tensors of all parameters that there are by now, as optimizers keep them."""
        states = (optimizer.state.values() for optimizer in self._optimizers)
        return tensors_in([dict(state) for state in chain.from_iterable(states)])


def build_optimizer(
    model: nn.Module,
    section: OptimizerSection,
    compile_backend: str | None = None,
    state_pool: ManagedPool | None = None,
    *,
    is_exact: bool = False,
) -> ModelOptimizer:
    """Return what updates the trainable parameters of `model` as `section` says; a collective with Muon.

    With a backend of torch.compile it is compiled, and takes gradients that are not scaled (Gradients.scale).

    With in_backward each parameter has an optimizer of its own. With `is_exact` an element's update does not depend on
    its shard. States are in `state_pool` where one is given.

    Weight decay is for matrices, not for norms and biases, unless a group says otherwise. A pipeline stage may have
    nothing to update (update_groups.require_updatable: of the whole model).
    """
    trainable = [(name, parameter) for name, parameter in canonical_parameters(model) if parameter.requires_grad]
    names = {parameter: name for name, parameter in trainable}
    groups: dict[str, list[dict[str, Any]]] = {}
    for rule, parameters in update_groups(trainable, section):
        group = {
            "params": parameters,
            "weight_decay": rule.weight_decay,
            "learning_rate_ratio": rule.learning_rate_ratio,
        }
        groups.setdefault(rule.optimizer, []).append(group)
    is_on_cpu = any(parameter.device.type == "cpu" for _, parameter in trainable)
    adamw = partial(_adamw, fused=not (is_exact and is_on_cpu))
    if compile_backend is not None:
        adamw = partial(_compiled_adamw, backend=compile_backend)
    build: dict[str, _Build] = {"muon": _muon, "adamw": adamw}
    together = list(groups.items())
    if section.in_backward:
        together = [(name, [one]) for name, of_name in groups.items() for group in of_name for one in _each(group)]
    optimizer = ModelOptimizer([build[name](of_name, names, section) for name, of_name in together])
    if state_pool is not None:
        optimizer.move_states(state_pool)
    return optimizer


def _each(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a group for each parameter of `group`."""
    return [{**group, "params": [parameter]} for parameter in group["params"]]


def _adamw(
    groups: list[dict[str, Any]], names: Mapping[nn.Parameter, str], section: OptimizerSection, *, fused: bool
) -> _Part:
    match section.state_dtype:
        case "float32":
            # On a processor the fused kernel rounds the last elements of a tensor, which fill no vector, otherwise
            # than the rest: 56 of 100,003 elements in tensors of 7 (torch 2.13, AVX2).
            rate, betas, eps = section.learning_rate, section.betas, section.eps
            return AdamW(groups, lr=rate, betas=betas, eps=eps, fused=fused, foreach=not fused)
        case "bfloat16":
            return Bfloat16AdamW(groups, names, lr=section.learning_rate, betas=section.betas, eps=section.eps)
        case "int8":
            return Int8AdamW(groups, names, lr=section.learning_rate, betas=section.betas, eps=section.eps)


def _compiled_adamw(
    groups: list[dict[str, Any]], names: Mapping[nn.Parameter, str], section: OptimizerSection, *, backend: str
) -> _Part:
    rate, betas, eps = section.learning_rate, section.betas, section.eps
    return CompiledAdamW(groups, lr=rate, betas=betas, eps=eps, backend=backend)


def _muon(groups: list[dict[str, Any]], names: Mapping[nn.Parameter, str], section: OptimizerSection) -> Muon:
    dtype = torch.bfloat16 if section.state_dtype == "bfloat16" else None
    return Muon(groups, names, lr=section.learning_rate, momentum=section.momentum, state_dtype=dtype)


def _parameters_of(optimizer: _Part) -> list[nn.Parameter]:
    if isinstance(optimizer, Int8AdamW):
        return optimizer.parameters
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _initial_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    if isinstance(optimizer, Bfloat16AdamW | CompiledAdamW | Muon):
        return optimizer.initial_state(parameter)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def optimizer_state(model: nn.Module, optimizer: ModelOptimizer) -> dict[str, dict[str, list[Tensor]]]:
    """Return the optimizer's state tensors by parameter name, zeros before the first step.

    Loading into them in place restores the optimizer. A parameter that several stages on this rank hold has several.
    """
    by_name: dict[str, dict[str, list[Tensor]]] = {}
    for name, parameter in canonical_parameters(model):
        if parameter.requires_grad:
            for key, tensor in optimizer.state_of(parameter).items():
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
