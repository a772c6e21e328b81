"""What depends on the torch version or on its private parts: one function each, tested against the version at hand.

torch 2.11 to 2.15 are supported. Where torch has no public way, the function says so.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright.parallelism.pipeline.stages import Stages

Value = TypeVar("Value")

_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def local_box(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's part of `tensor` and the global offset of its first element in each dim.

    For a plain tensor that is the tensor itself at offset 0. DTensor has no public call for the offset
    (checked in 2.13).
    """
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offsets


def canonical_fqn(fqn: str) -> str:
    """Return the parameter's name in the plain model, without the prefixes of wrapper modules."""
    for prefix in _WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
    return fqn


def canonical_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name in the plain model, parameter) of every parameter, tied ones once, in the model's order.

    Two stages on one rank may both hold a parameter of one name, such as an embedding that is the head too.
    """
    return [(canonical_fqn(fqn), parameter) for part in _plain(model) for fqn, parameter in part.named_parameters()]


def copies_by_name(named: Iterable[tuple[str, Value]]) -> dict[str, list[Value]]:
    """Return what there is of each name, as a checkpoint takes it, in the order of first appearance."""
    copies: dict[str, list[Value]] = {}
    for name, value in named:
        copies.setdefault(name, []).append(value)
    return copies


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the model's author calls state, by their names in the plain model.

    Which ones those are torch tells in private only, but for a whole state_dict (checked in 2.13).
    """
    return {
        canonical_fqn(f"{module_name}.{name}" if module_name else name): buffer
        for part in _plain(model)
        for module_name, module in part.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def keep_backward_inputs() -> None:
    """Have what is compiled from now on leave the tensors that it saved for backward as they are, in this process.

    torch has no public way (checked in 2.13).
    """
    functorch_config.donated_buffer = False


def silence_known_warnings() -> None:
    """Hide torch's warnings that a user can do nothing about; every other warning stays."""
    # FSDP2 warns when the root module returns a view of a tensor (2.13), as one whose last layer is a Linear does;
    # nothing is written in place here, and the contract asks the same of a model's own loss.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    # 2.13 deprecates collectives that its own FSDP and checkpoint code still calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")


def _plain(model: nn.Module) -> Iterable[nn.Module]:
    """Return the modules in which parameters have the names that they have in the plain model."""
    return model if isinstance(model, Stages) else [model]
