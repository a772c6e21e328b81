"""Faults that change numbers of one rank: one bit of a parameter or gradient, a NaN, a loss that is far too large."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import local_box
from meshwright.spec.fault import Fault

_TOP_MANTISSA_BIT: Final = {torch.float64: 51, torch.float32: 22, torch.bfloat16: 6, torch.float16: 9}
"""A bit whose change keeps a number finite and of its order: what no check of the loss finds."""
_INTEGERS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def spoil(fault: Fault, model: Stages | None) -> None:
    """Change numbers of `model`, this rank's stages, as `fault` says."""
    assert model is not None, "numbers are spoiled in a step, when the model exists"
    if fault.kind == "loss-spike":
        _spoil_next_output(model, fault.argument)
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        if fault.kind == "flip-parameter":
            flip_bit(_largest(local_box(parameter.detach())[0] for parameter in parameters))
            return
        gradient = _largest(local_box(one.grad)[0] for one in parameters if one.grad is not None)
        if fault.kind == "flip-gradient":
            flip_bit(gradient)
        else:
            gradient.view(-1)[_place(gradient)] = torch.nan


def flip_bit(tensor: Tensor) -> None:
    """Flip the highest bit of the mantissa of the number of largest magnitude, in place: it changes by a quarter to a
    half.
    """
    integers = tensor.view(-1).view(_INTEGERS[tensor.element_size()])
    integers[_place(tensor)] ^= 1 << _TOP_MANTISSA_BIT[tensor.dtype]


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    """Return the first of the tensors with the most elements; ranks that hold copies of it choose the same."""
    return max(tensors, key=lambda tensor: tensor.numel())


def _place(tensor: Tensor) -> int:
    return int(tensor.reshape(-1).abs().argmax())


def _spoil_next_output(model: Stages, factor: float) -> None:
    """Multiply what the rank's last stage returns by `factor`, once."""

    def multiply(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output * factor

    handle = [*model][-1].register_forward_hook(multiply)
