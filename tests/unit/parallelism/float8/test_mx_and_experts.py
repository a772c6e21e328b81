"""MXFP8 linear layers and experts in float8, emulated: close to 32 bits, and as torchao computes them."""

import pytest
import torch
from torch import nn

pytest.importorskip("torchao", reason="needs meshwright[torchao]")

from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from meshwright.models.grouped_matmul import grouped_matmul
from meshwright.parallelism.float8.float8_experts import Float8GroupedMatmul
from meshwright.parallelism.float8.mx_linear import MXFP8Linear


def leaf(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def relative(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float(((found - expected).norm() / expected.norm()).detach())


def test_an_mxfp8_layer_is_torchaos_to_the_bit() -> None:
    layer = nn.Linear(64, 96, bias=False)
    x, other = leaf(4, 32, 64), leaf(4, 32, 64)
    expected = _to_mxfp8_then_scaled_mm(other, layer.weight, KernelPreference.EMULATED, ScaleCalculationMode.RCEIL)
    (expected * leaf(4, 32, 96, seed=1).detach()).sum().backward()
    of_weight, layer.weight.grad = layer.weight.grad, None
    layer.__class__, layer.emulates = MXFP8Linear, True
    found = layer(x)
    (found * leaf(4, 32, 96, seed=1).detach()).sum().backward()
    assert relative(found, expected) < 1e-6
    assert relative(x.grad, other.grad) < 1e-6
    assert relative(layer.weight.grad, of_weight) < 1e-6
    assert 1e-3 < relative(found, torch.nn.functional.linear(x, layer.weight)) < 0.05


def test_experts_in_float8_are_close_and_the_gradient_of_weights_is_exact() -> None:
    counts = torch.tensor([5, 0, 11])
    gradient = leaf(16, 32, seed=2).detach()
    results = []
    for multiply in (grouped_matmul, Float8GroupedMatmul(emulates=True)):
        rows, weights = leaf(16, 48), leaf(3, 32, 48, seed=1)
        output = multiply(rows, weights, counts)
        output.backward(gradient)
        results.append((output, rows.grad, weights.grad))
    (wide, low) = results
    assert all(1e-3 < relative(low[index], wide[index]) < 0.06 for index in (0, 1))
    torch.testing.assert_close(low[2], wide[2])


def test_rows_of_zeros_and_of_large_values_stay_finite() -> None:
    rows = torch.stack([torch.zeros(32), torch.full((32,), 3e37), torch.full((32,), 1e-37)])
    product = Float8GroupedMatmul(emulates=True)(rows, torch.eye(32)[None], torch.tensor([3]))
    torch.testing.assert_close(product, rows, rtol=0.07, atol=1e-30)
