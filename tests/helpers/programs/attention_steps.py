"""A step that attends in all the ways in which torch takes another kernel, for the tracer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, POSITIONS, WIDTH = 2, 4, 36, 64


def heads(device: torch.device, width: int = WIDTH, num: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(BATCH, num, POSITIONS, width, dtype=dtype, device=device, requires_grad=True)


def attend(device: torch.device, _rank: int, _world_size: int) -> Callable[[], None]:
    """Return a step that attends in each way, one after the other."""
    query, narrow, one = heads(device), heads(device, width=36), heads(device, num=2)
    exact = heads(device, dtype=torch.float32)
    mask = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool, device=device)

    def step() -> None:
        filled_up = F.scaled_dot_product_attention(narrow, narrow, narrow, is_causal=True)
        masked = F.scaled_dot_product_attention(query, query, query, mask, 0.1)
        grouped = F.scaled_dot_product_attention(query, key=one, value=one, enable_gqa=True)
        in_float32 = F.scaled_dot_product_attention(exact, exact, exact)
        with torch.no_grad():
            F.scaled_dot_product_attention(exact, exact, exact)
        # Backward is one of torch's own functions for each of them.
        torch.autograd.grad([one.sum() for one in (filled_up, masked, grouped, in_float32)], [narrow, query, exact])

    return step
