"""A backward in two parts finds what one backward finds, whatever nodes its graph has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.parallelism.torch_private.torch_split_backward import backward_to_inputs, backward_to_weights


class _Double(torch.autograd.Function):
    """Two outputs of one node, as a compiled block has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product * weight + total, product * x + total


class _Stage(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._kind = kind
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            if self._kind == "functions":
                product, total = _Double.apply(x, weight)
                x = product.sin() + total.cos()
            else:
                x = F.silu(x @ weight) + x
            if self._kind == "shared":
                x = x @ self.weights[0]
        return x


@pytest.mark.parametrize("kind", ["operators", "functions"])
def test_each_part_recomputes_once(kind: str) -> None:
    stage, calls = _Stage(kind), []

    def counted(x: Tensor) -> Tensor:
        calls.append(x)
        return stage(x)

    received = torch.linspace(-1, 1, 36).view(6, 6).requires_grad_()
    output = checkpoint(counted, received, use_reentrant=False)
    pending = backward_to_inputs(output.sum(), None, received, stage)
    assert len(calls) == 2
    backward_to_weights(pending, stage)
    assert len(calls) == 3


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("kind", ["operators", "shared", "functions"])
def test_two_parts_find_what_one_backward_finds(kind: str, is_last: bool) -> None:
    whole, halves = _Stage(kind), _Stage(kind)
    received, other = (torch.linspace(-1, 1, 36).view(6, 6).requires_grad_() for _ in range(2))
    gradient = None if is_last else torch.arange(36.0).view(6, 6)
    # Twice: gradients are added to what is there.
    for _ in range(2):
        torch.autograd.backward(_output(whole, received, is_last), gradient)
        pending = backward_to_inputs(_output(halves, other, is_last), gradient, other, halves)
        backward_to_weights(pending, halves)
    torch.testing.assert_close(other.grad, received.grad)
    for found, expected in zip(halves.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def _output(stage: _Stage, x: Tensor, is_last: bool) -> Tensor:
    return stage(x).square().sum() if is_last else stage(x)
