"""Timings of a rank's matmuls, attention and memory-bound operations, by size.

The time of memory-bound operations, which are the modules of Meshwright's own models, eager, depends on the bytes read
and written, on the number of kernels and, on a CPU, on the functions evaluated: silu costs ten times an addition of as
many bytes. So each operation is timed separately.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.calibrator.size_grid import SizeGrid
from meshwright.calibrator.timing import Stopwatch
from meshwright.models.contract import next_token_loss
from meshwright.models.rope import rotate
from meshwright.spec.machine.measured import MemoryOp

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


# Last dims of small models; the measured sizes are multiples of them.
_WIDTH, _HEAD_DIM, _VOCAB_SIZE = 256, 64, 1024


def memory_op_seconds(sizes: SizeGrid, watch: Stopwatch) -> dict[tuple[MemoryOp, str, int], tuple[float, float | None]]:
    """Return the seconds forward and backward (None without one) by (operation, dtype, elements)."""
    took_s: dict[tuple[MemoryOp, str, int], tuple[float, float | None]] = {}
    for num_elements in sizes.num_elements:
        for dtype in sizes.dtypes:
            for op, (function, inputs) in _model_ops(num_elements, DTYPES[dtype], watch.device).items():
                took_s[op, dtype, num_elements] = both_ways_seconds(watch, function, *inputs)
        # Parameters, gradients and optimizer state are float32 for any compute dtype.
        for op, call in _parameter_ops(num_elements, watch.device).items():
            took_s[op, "float32", num_elements] = watch.seconds(call), None
    return took_s


def _model_ops(
    num_elements: int, dtype: torch.dtype, device: torch.device
) -> dict[MemoryOp, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Return each operation as a function with inputs of `num_elements`."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    rows = num_elements // _WIDTH
    heads_BSNH = random(1, num_elements // (4 * _HEAD_DIM), 4, _HEAD_DIM)
    angles_SH = torch.randn(heads_BSNH.shape[1], _HEAD_DIM, device=device)
    logits_BSV = random(1, num_elements // _VOCAB_SIZE, _VOCAB_SIZE)
    targets_BS = torch.zeros(logits_BSV.shape[:2], dtype=torch.long, device=device)
    return {
        "add": (lambda x: x + x, [random(rows, _WIDTH)]),
        "swiglu": (lambda gate, up: F.silu(gate) * up, [random(rows, _WIDTH), random(rows, _WIDTH)]),
        "norm": (lambda x, weight: F.rms_norm(x, (_WIDTH,), weight, eps=1e-5), [random(rows, _WIDTH), random(_WIDTH)]),
        "rope": (rotate, [heads_BSNH, angles_SH, angles_SH]),
        "loss": (next_token_loss, [logits_BSV, targets_BS]),
    }


def _parameter_ops(num_elements: int, device: torch.device) -> dict[MemoryOp, Callable[[], object]]:
    # A block has about eight parameters.
    parameters = [nn.Parameter(torch.randn(num_elements // 8, device=device)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    return {"update": optimizer.step, "clip": partial(nn.utils.clip_grad_norm_, parameters, 1.0)}
