"""Timings of a rank's matmuls and attention, by size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.calibrator.size_grid import SizeGrid
from meshwright.calibrator.timing import Stopwatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""dtypes by their names in the catalogue."""


def matmul_seconds(sizes: SizeGrid, watch: Stopwatch) -> dict[tuple[str, int, int, int], float]:
    """Return the seconds of the three matmuls of a linear layer, by (dtype, rows, columns, inner).

    Output, input gradient and weight gradient have different memory layouts, so their rates differ.
    """
    took_s = {}
    for dtype, rows, columns, inner in itertools.product(
        sizes.dtypes, sizes.matmul_rows, sizes.matmul_widths, sizes.matmul_widths
    ):
        operands = (
            torch.randn(shape, dtype=DTYPES[dtype], device=watch.device)
            for shape in ((rows, inner), (columns, inner), (rows, columns))
        )
        calls = [partial(_products, *copy) for copy in watch.copies(*operands)]
        took_s[dtype, rows, columns, inner] = watch.seconds(*calls)
    return took_s


def attention_seconds(sizes: SizeGrid, watch: Stopwatch) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Return the seconds of causal attention, forward and backward, by (dtype, seq_len, head_dim)."""
    took_s = {}
    for dtype, seq_len, head_dim in itertools.product(sizes.dtypes, sizes.seq_lens, sizes.head_dims):
        shape = (1, sizes.num_heads, seq_len, head_dim)
        inputs = (torch.randn(shape, dtype=DTYPES[dtype], device=watch.device, requires_grad=True) for _ in range(3))
        attention = partial(F.scaled_dot_product_attention, is_causal=True)
        took_s[dtype, seq_len, head_dim] = both_ways_seconds(watch, attention, *inputs)
    return took_s


def both_ways_seconds(watch: Stopwatch, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Return the seconds of `function(*inputs)` and of its backward."""
    forwards = [partial(function, *copy) for copy in watch.copies(*inputs)]
    backwards = []
    for forward in forwards:
        result, wanted = forward(), [tensor for tensor in forward.args if tensor.requires_grad]
        backwards.append(partial(torch.autograd.grad, result, wanted, torch.ones_like(result), retain_graph=True))
    return watch.seconds(*forwards), watch.seconds(*backwards)


def _products(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return a linear layer's output, input gradient and weight gradient."""
    return torch.mm(x, weight.t()), torch.mm(gradient, weight), torch.mm(gradient.t(), x)
