"""Digest of a rank's tensors, to compare copies: xxh3 of the bytes on a processor, integer sums on a device.

On a CUDA device copying all bytes to the host would take far longer than reading them. There the digest of a tensor is
(sum of x(i), sum of x(i) * (i + 1)) modulo 2^64 over its elements as integers, of which every changed bit changes the
first, and an exchange of two elements the second.
"""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from meshwright.checkpoint.saving import bytes_of

_BLOCK_ELEMENTS = 1 << 22
"""Elements that are widened to 64 bits at once."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensors: Iterable[Tensor]) -> int:
    """Return a signed 64-bit digest of the tensors in their order; equal for equal bits, on one type of device."""
    hasher, on_device = xxhash.xxh3_64(), []
    for tensor in tensors:
        if tensor.device.type == "cpu":
            hasher.update(bytes_of(tensor))
        else:
            on_device.append(_sums(tensor.detach()))
    if on_device:
        # One copy for all tensors: each would wait for the device.
        hasher.update(bytes_of(torch.stack(on_device)))
    digest = hasher.intdigest()
    return digest - 2**64 if digest >= 2**63 else digest


def _sums(tensor: Tensor) -> Tensor:
    integers = tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for block in integers.split(_BLOCK_ELEMENTS):
        wide = block.to(torch.int64)
        sums[0] += wide.sum()
        # Places count from the block's start: equal in all copies, which is all that matters.
        sums[1] = sums[1] * 31 + (wide * torch.arange(1, len(wide) + 1, device=wide.device)).sum()
    return sums
