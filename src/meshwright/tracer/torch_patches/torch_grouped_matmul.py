"""Grouped matmuls of formats that CUDA has no kernel for: all but bfloat16 (aten/src/ATen/native/GroupedMMUtils.h).

torch's own fake implementation refuses them, where CUDA reads the groups' ends and multiplies one group after another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUPED_MATMUL = torch.ops.aten._grouped_mm.default
_MATRIX = 2


def is_by_loop(first: Tensor) -> bool:
    """Return whether CUDA multiplies the groups of a grouped matmul one by one."""
    return first.dtype in (torch.float32, torch.float16)


def run_by_loop(first: Tensor, second: Tensor, ends: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the products of all groups, whose rows are taken to be spread evenly."""
    if ends is None:
        return torch.bmm(first, second)
    torch.ops.aten._to_copy.default(ends, device=torch.device("cpu"))
    count, is_sum = len(ends), first.dim() == second.dim() == _MATRIX
    size = (first.shape[-2], second.shape[-1])
    result = first.new_empty((count, *size) if is_sum else size)
    for group in range(count):
        lefts = first.tensor_split(count, dim=1 if is_sum else 0)[group] if first.dim() == _MATRIX else first[group]
        rights = second.tensor_split(count, dim=0 if is_sum else 1)[group] if second.dim() == _MATRIX else second[group]
        parts = result if is_sum else result.tensor_split(count, dim=0 if first.dim() == _MATRIX else 1)
        torch.mm(lefts, rights, out=parts[group])
    return result
