"""The kernel that F.scaled_dot_product_attention selects on CUDA, and its call on the simulated accelerator.

torch selects in C++ that is built with CUDA only (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); its rules are
repeated here: the first of cuDNN, flash, memory-efficient and math attention that supports the arguments, for compute
capability 9.0 and a cuDNN newer than 9.15. Other devices and libraries take flash where both support the arguments; its
tensors are equal, and cost/attention_rates.py prices cuDNN's operator there as what runs. Ignored: older GPUs and
libraries, where a mask with grouped heads runs as matmuls; cuDNN with head dims above 128, except 192 for keys with 128
for values; nested tensors.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from meshwright.tracer.record.simulated_device import NAME
from meshwright.tracer.torch_patches.torch_autocast import lowered
from meshwright.tracer.torch_patches.torch_names import EFFICIENT_IS_GROUPED

_HALF = (torch.bfloat16, torch.float16)
_FLASH_WIDTHS = 8
"""Flash attention has kernels for multiples of this head dim; torch pads heads with zeros."""
_MASK_ROWS = 8
"""Memory-efficient attention requires mask rows aligned to multiples of this."""
_WIDEST_FLASH = 256
_WIDEST_CUDNN, _LATENT_WIDTHS = 128, (192, 128)
_CUDNN_DROPOUTS = 16.0
"""cuDNN supports dropout in sixteenths."""


_SWITCHES: dict[str, Callable[[], Any]] = {
    "flash": cuda.flash_sdp_enabled,
    "cudnn": cuda.cudnn_sdp_enabled,
    "efficient": cuda.mem_efficient_sdp_enabled,
    "math": cuda.math_sdp_enabled,
}
"""Set by torch.nn.attention.sdpa_kernel."""


class AttentionCall(NamedTuple):
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
        """Return whether a backward follows."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.heads)


def cuda_kernel(call: AttentionCall) -> SDPBackend:
    """Return the kernel that CUDA would use; raises RuntimeError, as torch does, if none supports the call."""
    is_plain = _is_plain(call, takes_groups=True)
    if _is_allowed("cudnn") and is_plain and _cudnn_can(call):
        return SDPBackend.CUDNN_ATTENTION
    if _is_allowed("flash") and is_plain and _flash_can(call):
        return SDPBackend.FLASH_ATTENTION
    is_plain = _is_plain(call, takes_groups=EFFICIENT_IS_GROUPED)
    if _is_allowed("efficient") and is_plain and _efficient_can(call):
        return SDPBackend.EFFICIENT_ATTENTION
    if _is_allowed("math"):
        return SDPBackend.MATH
    raise RuntimeError("No available kernel. Aborting execution.")


# Dynamo cannot trace the switches: a graph break would follow.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_allowed(kernel: str) -> bool:
    return bool(_SWITCHES[kernel]())


def _is_plain(call: AttentionCall, *, takes_groups: bool) -> bool:
    """Return whether both fused kernels support the shapes: B, heads, positions, contiguous head dim."""
    if any(x.dim() != 4 or x.dtype != call.query.dtype or x.shape[-2] == 0 for x in call.heads):
        return False
    batches, heads = ({x.shape[dim] for x in call.heads} for dim in (0, 1))
    is_grouped = call.enable_gqa and takes_groups and call.key.shape[1] == call.value.shape[1]
    has_heads = len(heads) == 1 or (is_grouped and call.query.shape[1] % call.key.shape[1] == 0)
    return len(batches) == 1 and has_heads and all(x.stride(-1) == 1 for x in call.heads)


def _flash_can(call: AttentionCall) -> bool:
    widths = {x.shape[-1] for x in call.heads}
    is_square = call.query.shape[-2] == call.key.shape[-2]
    return (
        call.attn_mask is None
        and call.query.dtype in _HALF
        and len(widths) == 1
        and max(widths) <= _WIDEST_FLASH
        and (is_square or not call.is_causal)
    )


def _cudnn_can(call: AttentionCall) -> bool:
    query, key, value = call.heads
    widths = query.shape[-1], value.shape[-1]
    return (
        query.dtype in _HALF
        and key.shape[-1] == query.shape[-1]
        and (max(widths) <= _WIDEST_CUDNN or widths == _LATENT_WIDTHS)
        and not any(width % _FLASH_WIDTHS for width in widths)
        and (call.dropout_p * _CUDNN_DROPOUTS).is_integer()
        and key.shape[-2] > 1
        and (call.dropout_p == 0 or query.shape[-2] > 1)
        and not torch.are_deterministic_algorithms_enabled()
        and _cudnn_masks(call)
    )


def _cudnn_masks(call: AttentionCall) -> bool:
    mask = call.attn_mask
    if mask is None:
        return True
    rows, columns = call.query.shape[-2], call.key.shape[-2]
    is_whole = mask.shape[-2] in (1, rows) and mask.shape[-1] in (1, columns) and mask.stride(-1) == 1
    of_heads = zip(mask.shape[:-2], call.query.shape[:2], strict=False)
    is_of_heads = mask.dim() == 2 or (mask.dim() == 4 and all(size in (1, whole) for size, whole in of_heads))
    return is_whole and is_of_heads and not mask.requires_grad


def _efficient_can(call: AttentionCall) -> bool:
    query, key, value = call.heads
    # Its kernels load 128 bits at once.
    multiple = 16 // query.element_size()
    return (
        query.dtype in (*_HALF, torch.float32)
        and query.shape[-1] == key.shape[-1]
        and all(x.shape[-1] > 0 and x.shape[-1] % multiple == 0 for x in (query, value))
        and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)
    )


def as_on_cuda(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return scaled_dot_product_attention with CUDA's kernels on the simulated accelerator.

    `attend` is torch's own, which uses matmuls on a device without fused kernels.
    """

    @functools.wraps(attend)
    def attended(*args: Any, **kwargs: Any) -> Tensor:
        call = AttentionCall(*args, **kwargs)
        # A trace on the host keeps torch's own attention.
        if call.query.device.type != NAME:
            return attend(*args, **kwargs)
        if torch.is_autocast_enabled(NAME):
            args, kwargs = lowered((args, kwargs), NAME)
            call = AttentionCall(*args, **kwargs)
        kernel = cuda_kernel(call)
        if kernel == SDPBackend.FLASH_ATTENTION:
            return _flash(call)
        if kernel == SDPBackend.CUDNN_ATTENTION:
            return _cudnn(call)
        return _efficient(call) if kernel == SDPBackend.EFFICIENT_ATTENTION else attend(*args, **kwargs)

    return attended


def _flash(call: AttentionCall) -> Tensor:
    width = call.query.shape[-1]
    scale = width**-0.5 if call.scale is None else call.scale
    missing = -width % _FLASH_WIDTHS
    heads = [F.pad(x, (0, missing)) for x in call.heads] if missing else call.heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    result: Tensor = flash(*heads, call.dropout_p, call.is_causal, scale=scale)[0]
    return result[..., :width] if missing else result


def _cudnn(call: AttentionCall) -> Tensor:
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    mask, options = _added(call), (call.is_training, call.dropout_p, call.is_causal)
    result: Tensor = cudnn(*call.heads, mask, *options, scale=call.scale)[0]
    return result


def _efficient(call: AttentionCall) -> Tensor:
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    mask, training = _added_mask(call), call.is_training
    result: Tensor = efficient(*call.heads, mask, training, call.dropout_p, call.is_causal, scale=call.scale)[0]
    return result


def _added(call: AttentionCall) -> Tensor | None:
    """Return the additive mask: a boolean one as zero and minus infinity."""
    mask = call.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=call.query.dtype, device=mask.device)
    return torch.where(mask, zero, float("-inf"))


def _added_mask(call: AttentionCall) -> Tensor | None:
    """Return the additive mask of all heads, with rows aligned for memory-efficient attention."""
    mask = _added(call)
    if mask is None:
        return None
    if any(stride % _MASK_ROWS for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, _MASK_ROWS - width % _MASK_ROWS))[..., :width]
    return mask.expand(*call.query.shape[:3], call.key.shape[2])
