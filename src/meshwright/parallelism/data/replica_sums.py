"""Whole parameters without FSDP2: gradients summed over replicas where they are, while backward runs.

Where no rank shares its parameters with another and nothing is cast, all that FSDP2 has left to do is this sum. On a
processor it costs three copies of each gradient (into a buffer, divided by 1, out of it) and one of each parameter, and
backward waits for the sum of each block, since FSDP2 calls its all-reduce synchronously (torch 2.13). Here large
gradients are summed in place, each as soon as backward has made it, small ones all at once after backward, and nothing
waits before that.

All ranks start their collectives in one order, that of registration from the last parameter to the first, which is
about that of backward: a gradient that is ready before its turn waits for it. Independent replicas, each a process
group of its own, are no exception: what sums over them is given later.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from meshwright.parallelism.graph.graph_sharded import cast_inputs
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.torch_private.torch_module_marks import mark_calls
from meshwright.spec.job.sections import PrecisionSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.gradient_sums import SUMMED_ALONE_BYTES
from meshwright.spec.trace.timeline import AXIS_MARK, REPLICAS_MARK


def needs_no_sharding(model: nn.Module, layout: Layout, precision: PrecisionSection, device_type: str) -> bool:
    """Return whether FSDP2 would neither shard nor cast anything of `model`, on processors."""
    is_whole = layout.num_ranks == layout.dp_replicate and not layout.cpu_offload
    # Scales of float8 weights are kept by FSDP2's gathers.
    is_wide = precision.compute == precision.reduce == "float32" and precision.float8 == "none"
    return (
        device_type == "cpu"
        and is_whole
        and is_wide
        and all(parameter.dtype is torch.float32 for parameter in model.parameters())
    )


def replicate_model(model: nn.Module, meshes: Meshes) -> "ReplicaSums | None":
    """Return what sums the gradients of a whole model, whose inputs in floating point are cast; None on one rank."""
    cast_inputs(model, torch.float32)
    mark_calls(model)
    if meshes.has_outer_replicas:
        return ReplicaSums(model)
    group = meshes.group("dp_replicate")
    return ReplicaSums(model, partial(start_all_reduce, group)) if meshes.degree("dp_replicate") > 1 else None


class StartedSum(Protocol):
    """A sum over replicas that is under way."""

    def wait(self) -> object:
        """Return once it is done."""


class ReplicaSums:
    """The gradients of a model that each replica holds whole."""

    def __init__(self, model: nn.Module, start_sum: Callable[[Tensor], StartedSum] | None = None) -> None:
        self._model = model
        self.start_sum = start_sum
        """What starts to sum a tensor over all replicas, in place; None as long as there are no others."""
        self._large: list[nn.Parameter] = []
        self._small: list[nn.Parameter] = []
        self._waiting: list[nn.Parameter] = []
        """Large parameters whose sums are not started, the next one last."""
        self._ready: set[nn.Parameter] = set()
        self._sums: list[StartedSum] = []
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """Sum gradients in the next backward, the last of a step."""
        if self.start_sum is None:
            return
        if not self._large and not self._small:
            # Not before: parameters have no memory until the model is materialized.
            trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            self._small = [parameter for parameter in trainable if _is_small(parameter)]
            self._large = [parameter for parameter in trainable if not _is_small(parameter)]
        self._waiting = list(self._large)
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in self._waiting]

    @torch.no_grad()
    def end(self) -> None:
        """Start the sums that backward has not, and wait for all of them; a collective."""
        if self.start_sum is None:
            return
        for hook in self._hooks:
            hook.remove()
        for parameter in reversed(self._waiting):
            self._start(parameter)
        self._sum_at_once([parameter.grad for parameter in self._small if parameter.grad is not None])
        for started in self._sums:
            started.wait()
        self._waiting, self._hooks, self._sums = [], [], []
        self._ready.clear()

    def sum_now(self, parameter: nn.Parameter) -> None:
        """Sum the gradient of one parameter, which is used before backward ends; a collective."""
        assert parameter.grad is not None
        assert self.start_sum is not None
        self.start_sum(parameter.grad).wait()

    @torch.no_grad()
    def _note(self, parameter: Tensor) -> None:
        self._ready.add(cast(nn.Parameter, parameter))
        while self._waiting and self._waiting[-1] in self._ready:
            self._start(self._waiting.pop())

    def _start(self, parameter: nn.Parameter) -> None:
        """Start to sum a gradient, if there is one: an optimizer in backward has used and freed it."""
        assert self.start_sum is not None
        if parameter.grad is not None:
            self._sums.append(self.start_sum(parameter.grad))

    def _sum_at_once(self, gradients: Sequence[Tensor]) -> None:
        if not gradients:
            return
        assert self.start_sum is not None
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.start_sum(flat).wait()
        for gradient, total in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def start_all_reduce(group: dist.ProcessGroup, tensor: Tensor) -> dist.Work:
    """Start to sum a tensor over a process group, in place; marked for the profiler."""
    # The group may be that of all ranks, whose description names no axis.
    is_profiled = torch.autograd.profiler._is_profiler_enabled
    axis = record_function(f"{AXIS_MARK}mesh_dp_replicate") if is_profiled else nullcontext()
    with axis, record_function(REPLICAS_MARK):
        work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


def _is_small(parameter: nn.Parameter) -> bool:
    # Gradients have the strides of their parameters, and collectives send memory as it lies.
    return parameter.nbytes < SUMMED_ALONE_BYTES or not parameter.is_contiguous()
