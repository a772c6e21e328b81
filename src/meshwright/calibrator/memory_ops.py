"""Timings of memory-bound operations: the modules of Meshwright's own models, eager.

Their time depends on the bytes read and written, on the number of kernels and, on a CPU, on the functions evaluated:
silu costs ten times an addition of as many bytes. So each operation is timed separately.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.calibrator.kernels import DTYPES, both_ways_seconds
from meshwright.calibrator.size_grid import SizeGrid
from meshwright.calibrator.timing import Stopwatch
from meshwright.models.contract import next_token_loss
from meshwright.models.rope import rotate
from meshwright.spec.machine.measured import MemoryOp

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
        "norm": (_norm, [random(rows, _WIDTH), random(_WIDTH)]),
        "rope": (rotate, [heads_BSNH, angles_SH, angles_SH]),
        "loss": (next_token_loss, [logits_BSV, targets_BS]),
    }


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (_WIDTH,), weight, eps=1e-5)


def _parameter_ops(num_elements: int, device: torch.device) -> dict[MemoryOp, Callable[[], object]]:
    # A block has about eight parameters.
    parameters = [nn.Parameter(torch.randn(num_elements // 8, device=device)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    return {"update": optimizer.step, "clip": partial(nn.utils.clip_grad_norm_, parameters, 1.0)}
