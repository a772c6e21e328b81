"""Muon: momentum whose matrices are orthogonalized, for the matrices of blocks.

    momentum   M <- mu M + (1 - mu) G                     sharded as the parameter is
    update     O = orthogonalized(mu M + (1 - mu) G)      of whole matrices, with Nesterov's momentum
    step       W <- (1 - rate x decay) W - rate x 0.2 sqrt(max(rows, columns)) O

Orthogonalized means with all singular values moved near 1, by a polynomial of degree 5 applied five times. The factor
gives updates the root mean square that AdamW's have, so that both share a learning rate and a weight decay.

Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, for the method and the
coefficients; Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982, for the factor. torch.optim.Muon
computes the same of whole matrices; it has no notion of shards, and refuses stacked experts.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import MeshwrightError
from meshwright.parallelism.torch_private.torch_compat import local_box
from meshwright.trainer.optimizer.matrix_exchange import ShardedMatrix, exchanges_of
from meshwright.trainer.optimizer.stochastic_rounding import lower_half, name_key, random_bits, rounded
from meshwright.units import first_of

NUM_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MIN_NORM = 1e-7
_ADAMW_RMS = 0.2
"""The root mean square of AdamW's updates, as observed."""


class Muon(Optimizer):
    """Updates parameters of two dims or more; leading dims count matrices. `names` seed rounding to bfloat16."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        *,
        lr: float,
        momentum: float,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        """Keep the momentum in `state_dtype`, None for that of the parameters; a collective."""
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self._state_dtype, self._names = state_dtype, names
        self._group_of: dict[Tensor, dict[str, Any]] = {
            each: group for group in self.param_groups for each in group["params"]
        }
        self._exchanges = exchanges_of(self._group_of)

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of `parameter` before the first step."""
        state = {"momentum": torch.zeros_like(parameter, dtype=self._state_dtype)}
        if self._state_dtype is not None:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; a collective of the ranks that share them."""
        assert closure is None
        for group in self.param_groups:
            self._accumulate(group)
            torch._foreach_mul_([_local(each) for each in group["params"]], 1 - group["lr"] * group["weight_decay"])
        for exchange in self._exchanges:
            exchange.apply(self._direction, orthogonalized, self._take)

    def _accumulate(self, group: Mapping[str, Any]) -> None:
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter] = self.initial_state(parameter)
        if missing := [self._names[each] for each in group["params"] if each.grad is None]:
            raise MeshwrightError(
                f"no gradient in this step for {first_of(missing)}: Muon updates all matrices of blocks, so each must "
                'contribute to the loss of every step: change the model, or set optimizer.name to "adamw"'
            )
        gradients = [_local(each.grad) for each in group["params"]]
        momenta = [_local(self.state[each]["momentum"]) for each in group["params"]]
        if self._state_dtype is None:
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            return
        for parameter, momentum, gradient in zip(group["params"], momenta, gradients, strict=True):
            step = self.state[parameter]["step"].add_(1)
            local, offsets = local_box(parameter)
            bits = random_bits(name_key(self._names[parameter]), step, parameter.shape, local.shape, offsets)
            exact = momentum.to(gradient.dtype).lerp_(gradient, 1 - group["momentum"])
            momentum.copy_(rounded(exact.flatten(), lower_half(bits)).view(momentum.shape))

    def _direction(self, matrix: ShardedMatrix) -> Tensor:
        """Return this rank's part of what is orthogonalized, in the format of that."""
        parameter, momentum = matrix.parameter, self.state[matrix.parameter]["momentum"]
        assert parameter.grad is not None
        gradient, momentum = (matrix.of(_local(each)) for each in (parameter.grad, momentum))
        mu = self._group_of[parameter]["momentum"]
        ahead = gradient.lerp(momentum.to(gradient.dtype), mu)
        # Most CPUs multiply bfloat16 more slowly than float32, the format of the parameters, or float64 in a proof.
        return ahead if ahead.device.type == "cpu" else ahead.bfloat16()

    def _take(self, matrix: ShardedMatrix, part: Tensor) -> None:
        rate = self._group_of[matrix.parameter]["lr"]
        matrix.of(_local(matrix.parameter)).add_(part, alpha=-rate * _ADAMW_RMS * math.sqrt(max(matrix.shape)))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors and with singular values near 1, between about 0.7 and 1.2.

    In the format of `matrix`: bfloat16 is enough, since what the iteration returns is not exact anyway.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=_MIN_NORM)
    first, third, fifth = _COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), wide, beta=first)
    return wide.T if is_tall else wide


def _local(tensor: Tensor) -> Tensor:
    return local_box(tensor)[0]
