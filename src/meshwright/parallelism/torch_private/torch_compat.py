"""Private parts of torch and differences between 2.11 and 2.15, one function each, tested on the installed torch."""

import logging
import warnings
from collections.abc import Iterable, Sequence
from itertools import product
from types import ModuleType
from typing import TypeVar

from torch import Tensor, nn
from torch import distributed as dist
from torch._functorch import config as functorch_config
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)

from meshwright.extras import import_extra
from meshwright.parallelism.pipeline.stages import Stages

Value = TypeVar("Value")

_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def local_box(tensor: Tensor) -> tuple[Tensor, Sequence[int]]:
    """Return this rank's part of `tensor` and the global offset of its first element in each dim.

    A plain tensor is returned itself, at offset 0. DTensor's offset is private (2.13).
    """
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offsets


def boxes_along(tensor: Tensor, mesh_dims: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return (shape, offsets) of the parts of `tensor` on this rank and those that differ along `mesh_dims` alone.

    They are in the mesh's order. A plain tensor has one part, itself. DTensor's own function is private (2.13).
    """
    if not isinstance(tensor, DTensor):
        return [(tensor.shape, (0,) * tensor.dim())]
    mesh, own = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert own is not None
    places = product(*(range(mesh.size(dim)) if dim in mesh_dims else [own[dim]] for dim in range(mesh.ndim)))
    sizes = tuple(mesh.size(dim) for dim in range(mesh.ndim))
    return [
        _compute_local_shape_and_global_offset(tensor.shape, sizes, [*place], tensor.placements) for place in places
    ]


def canonical_fqn(fqn: str) -> str:
    """Return the parameter's name in the unwrapped model, without prefixes of wrapper modules."""
    for prefix in _WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
    return fqn


def state_dict_fqn(module: nn.Module, name: str) -> str:
    """Return the name that torch's state dicts of distributed modules give a parameter, without DDP's and the
    compiler's prefixes, which is private (2.13).
    """
    (fqn,) = _get_fqns(module, name)
    return fqn


def canonical_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name in the unwrapped model, parameter) of every parameter, tied ones once, in the model's order.

    Two stages on one rank may both hold a parameter of one name, such as a tied embedding.
    """
    return [(canonical_fqn(fqn), parameter) for part in _unwrapped(model) for fqn, parameter in part.named_parameters()]


def copies_by_name(named: Iterable[tuple[str, Value]]) -> dict[str, list[Value]]:
    """Return all values of each name, in order of first appearance."""
    copies: dict[str, list[Value]] = {}
    for name, value in named:
        copies.setdefault(name, []).append(value)
    return copies


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by their names in the unwrapped model.

    Persistence is private in torch, apart from a whole state_dict (2.13).
    """
    return {
        canonical_fqn(f"{module_name}.{name}" if module_name else name): buffer
        for part in _unwrapped(model)
        for module_name, module in part.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name, which is all of a group that compiled code holds (private, 2.13)."""
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    assert isinstance(group, dist.ProcessGroup)
    return group


def import_torchao(module: str, purpose: str) -> ModuleType:
    """Return a module of torchao; raises UnsupportedError that says which extra brings it.

    On import it logs warnings of its libraries for other devices, and torch one of an enumeration of its (0.18, 2.13).
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return import_extra(module, purpose)
    finally:
        logging.disable(before)


def keep_backward_inputs() -> None:
    """Disable buffer donation for this process: compiled backwards do not overwrite saved tensors (private, 2.13)."""
    functorch_config.donated_buffer = False


def silence_known_warnings() -> None:
    """Hide torch's warnings that a user cannot act on."""
    # FSDP2 warns when the root module returns a view (2.13), as a final Linear does; here nothing writes in place, and
    # the contract forbids it to a model's own loss.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    # 2.13 deprecates collectives that its own FSDP and checkpoint code still calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    # torchao 0.18 says of its own that a kernel library for another GPU or Python does not load, and registers enums in
    # a way that torch 2.13 deprecates. transformers imports it wherever it is installed.
    for name, text in (("torchao", "Failed to load "), ("torch.utils._pytree", "Calling register_constant() on Enum")):
        logging.getLogger(name).addFilter(_Without(text))


class _Without(logging.Filter):
    """Drops the records that hold a text; equal for equal texts, so that a logger keeps it once."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Without) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be shown."""
        return self._text not in record.getMessage()


def _unwrapped(model: nn.Module) -> Iterable[nn.Module]:
    """Return the modules in which parameters have their names in the unwrapped model."""
    return model if isinstance(model, Stages) else [model]
