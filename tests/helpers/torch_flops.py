"""counted_flops: what torch counts of a model's pass forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import meshwright.models.build  # noqa: F401 - registers the operators below


def _grouped_flops(rows_RI: Any, weight_EOI: Any, counts_E: Any, **_: Any) -> int:
    return int(2 * rows_RI[0] * weight_EOI[1] * weight_EOI[2])


def _weight_gradient_flops(gradient_RO: Any, rows_RI: Any, counts_E: Any, **_: Any) -> int:
    return int(2 * gradient_RO[0] * gradient_RO[1] * rows_RI[1])


_GROUPED_FLOPS: dict[Any, Any] = {
    torch.ops.meshwright.grouped_matmul_by_loop: _grouped_flops,
    torch.ops.meshwright.grouped_matmul_by_loop_weight_gradient: _weight_gradient_flops,
}
"""What torch does not count itself, from the shapes of the arguments."""


def counted_flops(module: nn.Module, tokens_BS: torch.Tensor) -> tuple[int, int]:
    """Return the FLOPs of all matmuls but attention's, and those of attention, the pairs that are masked included."""
    # Unfused attention: torch has no count for the fused one of the CPU. Its matmuls are the only batched ones.
    mode = FlopCounterMode(display=False, custom_mapping=_GROUPED_FLOPS)
    with sdpa_kernel(SDPBackend.MATH), mode as counter:
        module(tokens_BS).float().logsumexp(-1).mean().backward()
    counts = counter.get_flop_counts()["Global"]
    of_attention = counts.pop(torch.ops.aten.bmm)
    return sum(counts.values()), of_attention
