"""Bfloat16AdamW: AdamW whose moments are bfloat16 between steps.

The update itself is torch's fused kernel on float32 copies of the moments, a few parameters at once, so that the copies
take little memory. What is kept is rounded stochastically. The parameters stay as they are, float32.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from meshwright.parallelism.torch_private.torch_compat import local_box
from meshwright.trainer.optimizer.stochastic_rounding import lower_half, name_key, random_bits, rounded, upper_half

_MAX_ELEMENTS = 1 << 24
"""Elements that are updated at once; a larger parameter is by itself."""


class Bfloat16AdamW(Optimizer):
    """Updates parameters by AdamW; `names` are those that seed the rounding."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._keys = {parameter: name_key(name) for parameter, name in names.items()}

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of `parameter` before the first step."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.bfloat16),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.bfloat16),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameters in _chunks([each for each in group["params"] if each.grad is not None]):
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: Mapping[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self.initial_state(parameter)
        states = [self.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        firsts, seconds = ([_local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        values = [_local(parameter) for parameter in parameters]
        first, second = (_joined(moments, values[0].dtype) for moments in (firsts, seconds))
        adamw(
            values,
            [_local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            _parts(first, values),
            _parts(second, values),
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        bits = torch.cat([self._bits(parameter, step) for parameter, step in zip(parameters, steps, strict=True)])
        for moments, exact, noise in ((firsts, first, lower_half(bits)), (seconds, second, upper_half(bits))):
            torch._foreach_copy_(moments, _parts(rounded(exact, noise), values))

    def _bits(self, parameter: nn.Parameter, step: Tensor) -> Tensor:
        local, offsets = local_box(parameter)
        return random_bits(self._keys[parameter], step, parameter.shape, local.shape, offsets)


def _chunks(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in order, as many at once as are updated together."""
    chunk: list[nn.Parameter] = []
    num_elements = 0
    for parameter in parameters:
        size = _local(parameter).numel()
        if chunk and num_elements + size > _MAX_ELEMENTS:
            yield chunk
            chunk, num_elements = [], 0
        chunk.append(parameter)
        num_elements += size
    if chunk:
        yield chunk


def _joined(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).to(dtype)


def _parts(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _local(tensor: Tensor) -> Tensor:
    return local_box(tensor)[0]
