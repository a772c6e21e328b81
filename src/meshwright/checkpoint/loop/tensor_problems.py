"""What keeps a tensor from being saved, or from being filled, in words."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, DTensor)


def saving_problem(tensor: Tensor) -> str | None:
    """Return why the bytes of `tensor` are not all there is to it, and what to save instead; None if they are."""
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            return "a DTensor with partial sums, which no rank has added up: redistribute it to Replicate() or Shard()"
        tensor = tensor.to_local()
    if tensor.is_nested:
        return "a nested tensor: save its values() and offsets()"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}: save its indices() and values(), or to_dense()"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values: make it with to_empty(device=...) first"
    if tensor.is_quantized:
        return "a quantized tensor, whose scale would be lost: save int_repr(), q_scale() and q_zero_point()"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugated or negated view: save resolve_conj() or resolve_neg() of it"
    if type(tensor) not in _PLAIN:
        return f"a {type(tensor).__name__}, a tensor class whose other parts would be lost: save its inner tensors"
    return None


def filling_problem(tensor: Tensor) -> str | None:
    """Return why a load cannot fill `tensor` in place, None where it can."""
    if (problem := saving_problem(tensor)) is not None:
        return problem
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return "a view of which several elements share their memory: clone() it first" if _overlaps(local) else None


def _overlaps(tensor: Tensor) -> bool:
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride < end:
                return True
            end += stride * (size - 1)
    return False
