"""Flash attention for ring attention: with the logsumexp as an output, and a backward that takes a given logsumexp.

Both are private in torch: the operators that F.scaled_dot_product_attention and its backward call. Signatures checked
in 2.13; run on CPU in 2.13, not yet on CUDA. The kernels need heads before positions, equal widths of keys and values
and, on CUDA, widths that are multiples of 8; this module converts.

Shapes: B batch, S queries, T keys, N query heads, K key/value heads, H width of a query or key head, W of a value head,
E the padded width of both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

_aten = torch.ops.aten

Heads = tuple[Tensor, Tensor, Tensor]
"""query_BSNH, key_BTKH and value_BTKW."""
Attended = tuple[Tensor, Tensor]
"""attended_BSNW and logsumexp_BSN."""


def has_flash_kernel(heads: Heads, is_causal: bool) -> bool:
    """Return whether the flash kernel supports these tensors: on CPU always, on CUDA 16-bit formats only."""
    if heads[0].device.type == "cpu":
        return True
    if heads[0].device.type != "cuda":
        return heads[0].dtype in (torch.bfloat16, torch.float16)
    query_BNSE, key_BKTE, value_BKTE = _kernel_inputs(heads)
    is_grouped = query_BNSE.shape[1] != key_BKTE.shape[1]
    return can_use_flash_attention(SDPAParams(query_BNSE, key_BKTE, value_BKTE, None, 0.0, is_causal, is_grouped))


def flash_attention(heads: Heads, is_causal: bool, scale: float) -> Attended:
    """Return attended_BSNW and logsumexp_BSN of the scores, in float32 at least; no gradient."""
    inputs = _kernel_inputs(heads)
    if inputs[0].device.type == "cpu":
        attended_BNSE, logsumexp_BNS = _aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, 0.0, is_causal, scale=scale
        )
    else:
        attended_BNSE, logsumexp_BNS, *_ = _aten._scaled_dot_product_flash_attention(
            *inputs, 0.0, is_causal, scale=scale
        )
    return attended_BNSE.transpose(1, 2)[..., : heads[2].shape[-1]], logsumexp_BNS.transpose(1, 2)


def flash_attention_backward(
    gradient_BSNW: Tensor, heads: Heads, whole: Attended, is_causal: bool, scale: float
) -> Heads:
    """Return the gradients of query, key and value; `whole` is the attention of these queries to all keys."""
    inputs = _kernel_inputs(heads)
    width = inputs[0].shape[-1]
    gradient_BNSE, attended_BNSE = (_padded(x, width).transpose(1, 2) for x in (gradient_BSNW, whole[0]))
    saved = (*inputs, attended_BNSE, whole[1].transpose(1, 2).contiguous())
    if inputs[0].device.type == "cpu":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = backward(gradient_BNSE.contiguous(), *saved, 0.0, is_causal, scale=scale)
    else:
        backward = _aten._scaled_dot_product_flash_attention_backward
        # Equal lengths need no cumulative lengths; without dropout the random state is unused.
        lengths = (None, None, inputs[0].shape[2], inputs[1].shape[2])
        state = torch.empty(2, dtype=torch.uint64, device=inputs[0].device)
        gradients = backward(gradient_BNSE, *saved, *lengths, 0.0, is_causal, state, state, scale=scale)
    query, key, value = (
        gradient.transpose(1, 2)[..., : given.shape[-1]] for gradient, given in zip(gradients, heads, strict=True)
    )
    return query, key, value


def _kernel_inputs(heads: Heads) -> Heads:
    width = max(x.shape[-1] for x in heads)
    if heads[0].device.type != "cpu":
        width += -width % 8
    query, key, value = (_padded(x, width).transpose(1, 2) for x in heads)
    return query, key, value


def _padded(x: Tensor, width: int) -> Tensor:
    """Return `x` zero-padded to `width`: zeros add nothing to scores, and are sliced off values."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
