"""Which kernel F.scaled_dot_product_attention takes on CUDA, and its call on the simulated accelerator.

torch chooses in C++ that is built with CUDA only (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), by rules that
are written here anew: the first of flash, memory-efficient and math that can do what is asked. They are those of GPUs
of compute capability 8.0 and 9.0. Not followed: that torch prefers cuDNN's kernel on Hopper and datacenter Blackwell if
the cuDNN that is installed is newer than 9.15, which no trace can know (its tensors are flash's, but it takes masks,
too); limits of single cards (8.6, 8.9, 12.0 above 192 wide); nested tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from meshwright.tracer.simulated_device import NAME

_HALF = (torch.bfloat16, torch.float16)
_FLASH_WIDTHS = 8
"""Flash attention has kernels for multiples of this; torch fills heads up with zeros."""
_MASK_ROWS = 8
"""Memory-efficient attention wants the rows of a mask to begin at multiples of this."""
_WIDEST_FLASH = 256
_EFFICIENT_IS_GROUPED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether memory-efficient attention takes fewer heads of keys than of queries."""


_SWITCHES: dict[str, Callable[[], Any]] = {
    "flash": cuda.flash_sdp_enabled,
    "efficient": cuda.mem_efficient_sdp_enabled,
    "math": cuda.math_sdp_enabled,
}
"""Those that torch.nn.attention.sdpa_kernel sets."""


class Asked(NamedTuple):
    """The arguments of scaled_dot_product_attention. B batch, N or K heads, S or T positions, H or W wide."""

    query: Tensor
    """BNSH."""
    key: Tensor
    """BKTH."""
    value: Tensor
    """BKTW."""
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value."""
        return self.query, self.key, self.value

    @property
    def is_training(self) -> bool:
        """Return whether a backward will come."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.heads)


def cuda_kernel(asked: Asked) -> SDPBackend:
    """Return the kernel that CUDA would take; RuntimeError, as torch's own, where the allowed ones cannot do it."""
    if _is_allowed("flash") and _is_plain(asked, takes_groups=True) and _flash_can(asked):
        return SDPBackend.FLASH_ATTENTION
    is_plain = _is_plain(asked, takes_groups=_EFFICIENT_IS_GROUPED)
    if _is_allowed("efficient") and is_plain and _efficient_can(asked):
        return SDPBackend.EFFICIENT_ATTENTION
    if _is_allowed("math"):
        return SDPBackend.MATH
    raise RuntimeError("No available kernel. Aborting execution.")


# A compiler cannot look into switches, and would cut its graph here.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_allowed(kernel: str) -> bool:
    return bool(_SWITCHES[kernel]())


def _is_plain(asked: Asked, *, takes_groups: bool) -> bool:
    """Return whether shapes are what both fused kernels want: B, heads, positions, and each head in one piece."""
    if any(x.dim() != 4 or x.dtype != asked.query.dtype or x.shape[-2] == 0 for x in asked.heads):
        return False
    batches, heads = ({x.shape[dim] for x in asked.heads} for dim in (0, 1))
    is_grouped = asked.enable_gqa and takes_groups and asked.key.shape[1] == asked.value.shape[1]
    has_heads = len(heads) == 1 or (is_grouped and asked.query.shape[1] % asked.key.shape[1] == 0)
    return len(batches) == 1 and has_heads and all(x.stride(-1) == 1 for x in asked.heads)


def _flash_can(asked: Asked) -> bool:
    widths = {x.shape[-1] for x in asked.heads}
    is_square = asked.query.shape[-2] == asked.key.shape[-2]
    return (
        asked.attn_mask is None
        and asked.query.dtype in _HALF
        and len(widths) == 1
        and max(widths) <= _WIDEST_FLASH
        and (is_square or not asked.is_causal)
    )


def _efficient_can(asked: Asked) -> bool:
    query, key, value = asked.heads
    # 128 bits, which its kernels load at once.
    multiple = 16 // query.element_size()
    return (
        query.dtype in (*_HALF, torch.float32)
        and query.shape[-1] == key.shape[-1]
        and all(x.shape[-1] > 0 and x.shape[-1] % multiple == 0 for x in (query, value))
        and (asked.attn_mask is None or asked.attn_mask.stride(-1) == 1)
    )


def as_on_cuda(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return scaled_dot_product_attention with CUDA's kernels on the simulated accelerator.

    `attend` is torch's own, which computes by matmuls on a device that has no kernels.
    """

    @functools.wraps(attend)
    def attended(*args: Any, **kwargs: Any) -> Tensor:
        asked = Asked(*args, **kwargs)
        kernel = SDPBackend.MATH if asked.query.device.type != NAME else cuda_kernel(asked)
        if kernel == SDPBackend.FLASH_ATTENTION:
            return _flash(asked)
        return _efficient(asked) if kernel == SDPBackend.EFFICIENT_ATTENTION else attend(*args, **kwargs)

    return attended


def _flash(asked: Asked) -> Tensor:
    width = asked.query.shape[-1]
    scale = width**-0.5 if asked.scale is None else asked.scale
    missing = -width % _FLASH_WIDTHS
    heads = [F.pad(x, (0, missing)) for x in asked.heads] if missing else asked.heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    result: Tensor = flash(*heads, asked.dropout_p, asked.is_causal, scale=scale)[0]
    return result[..., :width] if missing else result


def _efficient(asked: Asked) -> Tensor:
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    mask, training = _added_mask(asked), asked.is_training
    result: Tensor = efficient(*asked.heads, mask, training, asked.dropout_p, asked.is_causal, scale=asked.scale)[0]
    return result


def _added_mask(asked: Asked) -> Tensor | None:
    """Return what is added to the scores of all heads, in rows as the kernel wants them."""
    mask = asked.attn_mask
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zero = torch.scalar_tensor(0.0, dtype=asked.query.dtype, device=mask.device)
        mask = torch.where(mask.logical_not(), float("-inf"), zero)
    if any(stride % _MASK_ROWS for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, _MASK_ROWS - width % _MASK_ROWS))[..., :width]
    return mask.expand(*asked.query.shape[:3], asked.key.shape[2])
