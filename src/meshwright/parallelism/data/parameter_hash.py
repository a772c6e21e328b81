"""One hash over all parameters that does not depend on how they are sharded."""

import torch
import xxhash
from torch import distributed as dist
from torch import nn

from meshwright.parallelism.data.whole_tensors import whole_tensors
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters


def parameter_hash(model: nn.Module) -> str:
    """Return xxh3-128 over name, shape, dtype and bytes of every parameter in name order; a collective.

    Rank 0 puts them together one at a time and hashes; other ranks return "".
    """
    digest = xxhash.xxh3_128()
    for name, whole in whole_tensors(canonical_parameters(model)):
        digest.update(f"{name} {tuple(whole.shape)} {whole.dtype}".encode())
        digest.update(whole.view(-1).view(torch.uint8).numpy().data)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return digest.hexdigest() if is_first else ""
