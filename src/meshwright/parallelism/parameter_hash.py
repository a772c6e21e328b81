"""One hash over all parameters that does not depend on how they are sharded."""

import xxhash
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.parallelism.torch_compat import canonical_parameters


def parameter_hash(model: nn.Module) -> str:
    """Return xxh3-128 over name, shape, dtype and bytes of every parameter in name order; a collective.

    Parameters are gathered one at a time; only rank 0 hashes, other ranks return "".
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    digest = xxhash.xxh3_128()
    for name, parameter in sorted(canonical_parameters(model)):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if is_first:
            digest.update(f"{name} {tuple(full.shape)} {full.dtype}".encode())
            digest.update(full.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest() if is_first else ""
