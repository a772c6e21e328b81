"""Patches for behaviour of torch that differs under fake tensors from that on a device.

Each patch documents what would go wrong without it. Tried in torch 2.11, 2.13, 2.14 and 2.15; what each patch relies on
is tested against the installed torch.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import _functional_collectives, device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import _dispatch, _utils
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.optim import optimizer
from torch.utils import _foreach_utils

from meshwright.models.attention.sparse_backend import SparseAttention
from meshwright.tracer.numbers.scalar_placeholders import UnknownNumber
from meshwright.tracer.programs.program_lines import line_of_program
from meshwright.tracer.record.attention_kernels import as_on_cuda
from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.record.sparse_attention import as_operator
from meshwright.tracer.record.trace_recorder import TraceRecorder
from meshwright.tracer.record.untraceable import refuse_number, refuse_untraceable
from meshwright.tracer.torch_distributed.torch_data_parallel import reduce_by_hook
from meshwright.tracer.torch_distributed.torch_pipelining import (
    follow_schedules,
    mark_stage_messages,
    vote_by_own_stages,
)
from meshwright.tracer.torch_distributed.torch_works import coalesce_collectives, hold_results
from meshwright.tracer.torch_patches.torch_data_loader import read_without_workers
from meshwright.tracer.torch_patches.torch_names import register_kernels, replace
from meshwright.tracer.torch_patches.torch_parameters import move_states_in_place, update_shards_in_place

_outside_of_fake_mode = unset_fake_temporarily()
"""Decorates functions that compute with real tensors."""
_WITHOUT_TENSORS = ("__hash__", "__eq__", "__repr__", "__enter__", "__exit__", "__getstate__", "__setstate__")
"""Methods of a mesh that never read its ranks."""


def apply_patches(recorder: TraceRecorder, mode: RecordingMode) -> None:
    """Apply all patches to this process, permanently."""
    _real_mesh_algebra()
    replace(device_mesh, "new_group", _own_groups_only)
    replace(_fsdp_param, "_chunk_with_empty", lambda _: LazyChunks)
    replace(FSDPParamGroup, "finalize_backward", _waiting_for_unused_gathers)
    # DTensor runs an operator on unsharded tensors to infer shapes.
    replace(ShardingPropagator, "_propagate_tensor_meta_non_cached", recorder.paused())
    # Since 2.15: for devices that free memory by an operation, unlike CUDA.
    replace(_fsdp_collectives, "record_grad_output_stream", lambda _: _nothing)
    reduce_by_hook(mode)
    hold_results(mode)
    coalesce_collectives(mode)
    move_states_in_place(mode.device_type)
    update_shards_in_place()
    refuse_untraceable(recorder.scopes)
    read_without_workers()
    vote_by_own_stages()
    mark_stage_messages()
    follow_schedules(recorder.scopes)
    # The tracker keeps an RNG state on the device; nothing is drawn here. Up to torch 2.12 its construction compares
    # the states of all ranks.
    replace(_dispatch, "is_rng_supported_mesh", lambda _: lambda _: False)
    replace(OffsetBasedRNGTracker, "_distribute_region", lambda _: lambda *_, **__: nullcontext())
    # An optimizer uses its foreach implementation only for known tensor types.
    replace((optimizer, _foreach_utils), "_foreach_supported_types", lambda types: [*types, FakeTensor])
    _silent_kernels()
    replace(F, "scaled_dot_product_attention", as_on_cuda)
    replace(SparseAttention, "forward", as_operator)
    replace(_functional_collectives, "_are_we_tracing", lambda _: _is_compiling)
    replace(FakeTensorMode, "avoid_device_init", lambda _: property(_is_not_there))
    replace(torch, "tensor", lambda make: _tensor_by_way_of_cpu(make, mode))
    # torch requires a torch.Stream, which a device in Python does not have.
    replace(Tensor, "record_stream", lambda _: _as_method(mode.record_stream))
    replace(FakeTensor, "tolist", lambda _: _list_read_at_once(mode))
    replace(FakeTensor, "item", lambda _: _number_read(mode))
    replace(FakeTensor, "__bool__", lambda _: lambda tensor: bool(tensor.item()))
    replace(FakeTensor, "data_ptr", lambda _: _address)
    # As Tensor.__format__, which formats values for exact Tensors only.
    replace(
        FakeTensor,
        "__format__",
        lambda shown: lambda one, spec: shown(one, spec) if one.dim() else format(one.item(), spec),
    )


def _waiting_for_unused_gathers(finalize: Callable[..., None]) -> Callable[..., None]:
    """Wait for unused prefetched all-gathers: up to torch 2.14 a stream of torch's own does, which is not recorded."""

    @functools.wraps(finalize)
    def finalized(group: Any) -> None:
        gathered = group._all_gather_result
        if gathered is not None and gathered.all_gather_event is not None:
            group.device_handle.current_stream().wait_event(gathered.all_gather_event)
            group._all_gather_result = gathered._replace(all_gather_event=None)
        finalize(group)

    return finalized


def _is_not_there(_: FakeTensorMode) -> bool:
    """Without it, fake mode copies known numbers to the device for real."""
    return True


def _tensor_by_way_of_cpu(make: Callable[..., Tensor], mode: RecordingMode) -> Callable[..., Tensor]:
    """Make torch.tensor() copy by an operator: torch's own copies below all modes, to a device that does not exist."""

    @functools.wraps(make)
    def made(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        tensor = make(data, **kwargs)
        if device is None:
            if isinstance(tensor, FakeTensor) and isinstance(data, float | int) and get_proxy_mode() is None:
                mode.numbers.readings.put(tensor, [data])
            return tensor
        if get_proxy_mode() is not None:
            # In a compiled graph a copy of a constant would decompose into a real tensor.
            return torch.empty_like(tensor, device=device).copy_(tensor)
        moved = tensor.to(device)
        mode.numbers.readings.put(moved, np.asarray(data).ravel().tolist())
        return moved

    # TorchScript, which compiles parts of torch on import, identifies functions by identity.
    torch.jit._builtins._register_builtin(made, "aten::tensor")
    return made


_ADDRESS_BITS = 41
"""Address space of each storage."""
_numbers = itertools.count(1)
_addresses = weakref.WeakKeyDictionary[torch.UntypedStorage, int]()


def _address(tensor: Tensor) -> int:
    """Return a distinct address for each storage: fake tensors all have the same."""
    storage = tensor.untyped_storage()
    if tensor.device.type == "meta" or not storage.nbytes():
        return 0
    if storage not in _addresses:
        _addresses[storage] = next(_numbers) << _ADDRESS_BITS
    return _addresses[storage] + int(tensor.storage_offset()) * tensor.itemsize


def _list_read_at_once(mode: RecordingMode) -> Callable[[Tensor], Any]:
    """Read a list in one copy; torch reads a fake tensor element by element, each with a device sync."""

    def tolist(tensor: Tensor) -> Any:
        mode.numbers.read(tensor)
        numbers = [mode.numbers.element(tensor, place) for place in range(tensor.numel())]
        return np.array(numbers, dtype=object).reshape(tensor.shape).tolist()

    return tolist


def _number_read(mode: RecordingMode) -> Callable[[Tensor], Any]:
    """Read a scalar, which may be unknown."""

    def item(tensor: Tensor) -> Any:
        if mode.numbers.is_unknown(tensor):
            mode.numbers.read(tensor)
            return UnknownNumber(functools.partial(refuse_number, mode.recorder.scopes, line_of_program()))
        return mode.numbers.item(tensor)

    return item


def _real_mesh_algebra() -> None:
    """Run mesh algebra outside fake mode, which refuses to index the mesh's real tensor of ranks."""
    for name, found in list(DeviceMesh.__dict__.items()):
        if name in _WITHOUT_TENSORS:
            continue
        if isinstance(found, staticmethod | classmethod):
            setattr(DeviceMesh, name, type(found)(_outside_of_fake_mode(found.__func__)))
        elif isinstance(found, FunctionType):
            setattr(DeviceMesh, name, _outside_of_fake_mode(found))
        elif isinstance(found, property) and found.fget is not None:
            setattr(DeviceMesh, name, property(_outside_of_fake_mode(found.fget)))
    replace(device_mesh, "init_device_mesh", _outside_of_fake_mode)
    replace(_utils, "_compute_local_shape_and_global_offset", _outside_of_fake_mode)
    replace(_fully_shard, "_get_post_forward_mesh_info", _outside_of_fake_mode)


def _own_groups_only(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Make only this rank's groups of a mesh: making all, up to 100,000, takes seconds."""

    @functools.wraps(new_group)
    def made(ranks: Any = None, **kwargs: Any) -> Any:
        is_member = ranks is None or dist.get_rank() in ranks
        return new_group(ranks=ranks, **kwargs) if is_member else dist.GroupMember.NON_GROUP_MEMBER

    return made


class LazyChunks:
    """Lazy views of shards: FSDP2 makes one per rank and uses two, which takes minutes for 16,384 ranks."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.num_chunks, self.dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self.num_chunks

    def __getitem__(self, index: int) -> Tensor:
        size = self.tensor.size(self.dim)
        share = -(-size // self.num_chunks)
        start = index * share
        if start >= size:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(share, size - start))


def _as_method(function: Callable[[Tensor, Any], None]) -> Callable[[Tensor, Any], None]:
    """Return a plain function that binds as a method."""
    return lambda tensor, stream: function(tensor, stream)


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a function without effect on CUDA."""


def _is_compiling() -> bool:
    """Return whether torch compiles: under fake tensors it assumes so, and waits for collectives immediately."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


def _silent_kernels() -> None:
    """Register operators with one kernel on CUDA, which torch would otherwise decompose."""
    register_kernels("aten", dict.fromkeys(("silu_backward", "_fused_rms_norm"), _never_run), "PrivateUse1")


def _never_run(*_: Any, **__: Any) -> Any:
    raise AssertionError("fake tensors never reach a kernel")
