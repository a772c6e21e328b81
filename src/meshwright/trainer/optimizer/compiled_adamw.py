"""CompiledAdamW: AdamW in float32, compiled into one pass that also scales and clips the gradients.

The fused kernel reads what two passes before it have written: gradients divided into those of the mean loss, then
clipped. Here both factors are one number, `scale`, and the update reads each gradient once. It computes what
torch.optim.AdamW does, to rounding, and its state has the same names, so a run may change between the two.

On an accelerator one graph updates all parameters, a kernel each. On a processor the C++ compiler would take minutes
for hundreds of kernels: one graph of one parameter serves all of them, whatever their sizes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_Lists = list[list[Tensor]]


class CompiledAdamW(Optimizer):
    """Updates parameters by AdamW; `backend` is that of torch.compile."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, backend: str
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._backend = backend
        self._compiled: dict[bool, Callable[..., None]] = {}

    @torch.no_grad()
    def step(self, scale: Tensor | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient, from their gradients times `scale` (None: 1)."""
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = self.initial_state(parameter)
            if parameters:
                self._update(parameters, group, scale)

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of `parameter` before the first step."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def _update(self, parameters: list[nn.Parameter], group: Mapping[str, Any], scale: Tensor | None) -> None:
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        factors = _factors(torch.stack(steps), group, scale).to(parameters[0].dtype)
        lists: _Lists = [
            [_flat(parameter) for parameter in parameters],
            [_flat(parameter.grad) for parameter in parameters if parameter.grad is not None],
            *([_flat(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")),
            list(factors.unbind()),
        ]
        on_host = parameters[0].device.type == "cpu"
        for one in _each(lists) if on_host else [_held(lists)]:
            self._function(on_host)(*one)

    def _function(self, on_host: bool) -> Callable[..., None]:
        if on_host not in self._compiled:
            self._compiled[on_host] = torch.compile(_adamw, backend=self._backend, fullgraph=True, dynamic=on_host)
        return self._compiled[on_host]


def _factors(step_P: Tensor, group: Mapping[str, Any], scale: Tensor | None) -> Tensor:
    """Return the numbers of an update, [P, 8], in the order in which `_adamw` reads them."""
    first, second = group["betas"]
    # The first corrections are differences of nearly equal numbers.
    step_P = step_P.double()
    one_P = torch.ones_like(step_P)
    return torch.stack(
        (
            one_P if scale is None else scale.to(step_P).expand_as(step_P),
            one_P * (1 - group["lr"] * group["weight_decay"]),
            one_P * (1 - first),
            one_P * second,
            one_P * (1 - second),
            1 / (1 - second**step_P).sqrt(),
            one_P * group["eps"],
            group["lr"] / (1 - first**step_P),
        ),
        1,
    )


def _adamw(
    values: list[Tensor], gradients: list[Tensor], means: list[Tensor], squares: list[Tensor], factors: list[Tensor]
) -> None:
    """Update `values` and both moments in place."""
    for value, gradient, mean, square, numbers in zip(values, gradients, means, squares, factors, strict=True):
        # All numbers are tensors: torch.compile would compile again for another number.
        scale, keep, share_1, keep_2, share_2, correction, eps, rate = numbers.unbind()
        scaled = gradient * scale
        mean.add_((scaled - mean) * share_1)
        square.mul_(keep_2).add_(scaled * scaled * share_2)
        value.mul_(keep).sub_(mean / (square.sqrt() * correction + eps) * rate)


def _each(lists: _Lists) -> Iterator[_Lists]:
    """Yield the tensors of each parameter, but for empty shards."""
    for tensors in zip(*lists, strict=True):
        if tensors[0].numel():
            yield [[tensor] for tensor in tensors]


def _held(lists: _Lists) -> _Lists:
    """Return the lists without empty shards."""
    return [list(column) for column in zip(*(row for row in zip(*lists, strict=True) if row[0].numel()), strict=True)]


def _flat(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor's local shard in one dim: one graph then serves all shapes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.view(math.prod(local.shape)) if local.is_contiguous() else local
