"""Initial weights of each rank's shards: no rank holds more, and no layout changes them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.models.initial import fill
from meshwright.parallelism.torch_private.torch_compat import canonical_fqn, canonical_parameters, local_box


def materialize(model: nn.Module, device_type: str, seed: int, *, offloads: bool = False) -> None:
    """Fill meta tensors of `model` in place from (seed, name, element index); all others stay as built.

    With `offloads` parameters are on the CPU, as FSDP2's CPU offload requires; buffers are on the device.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    model.to_empty(device="cpu" if offloads else device_type)
    if offloads:
        _move_buffers(model, device_type)
    buffers = [(canonical_fqn(fqn), buffer) for fqn, buffer in model.named_buffers()]
    with torch.no_grad():
        for name, tensor in (*canonical_parameters(model), *buffers):
            local, offsets = local_box(tensor)
            initial = model.initial(name)  # type: ignore[operator]
            fill(local, initial, seed=seed, name=name, global_shape=tensor.shape, offsets=offsets)


def _move_buffers(model: nn.Module, device_type: str) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device_type))


def fill_from(model: nn.Module, read: Callable[[str], Tensor]) -> None:
    """Copy into each parameter this rank's shard of the full tensor that `read` returns for its name."""
    with torch.no_grad():
        for name, parameter in canonical_parameters(model):
            local, offsets = local_box(parameter)
            box = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
            local.copy_(read(name)[box])
