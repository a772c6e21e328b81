"""Work objects and futures of collectives, their reductions, and resized storages: effects that no operator shows.

Coalesced collectives (_coalescing_manager(), as for the buckets of Megatron-LM) share one Work object.

FSDP2 and messages wait for Work objects, and FSDP frees all-gathered parameters by resizing their storages to 0. torch
passes the reduction of a collective in an object that Python cannot read from the operator. Futures of fake works are
empty; real ones run their callbacks on a stream of a pool, so that the compute stream does not wait. Here that is one
stream, which runs callbacks in the order of their registration.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup, Work
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.record.simulated_device import NAME, SimulatedStream, device
from meshwright.tracer.torch_patches.torch_names import register_kernels, replace, with_values


def resizing_watched(mode: RecordingMode) -> AbstractContextManager[None]:
    """Report resized storages to `mode`."""
    resize = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        mode.storages.resized(storage)
        return result

    return with_values(torch.UntypedStorage, resize_=watched)


@contextmanager
def waiting_watched(mode: RecordingMode) -> Iterator[None]:
    """Report waits for Work objects to `mode`."""

    def watched(wait: Callable[..., Any]) -> Callable[..., Any]:
        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            mode.waited(work)
            return wait(work, *args, **kwargs)

        return waited

    with with_values(FakeWork, wait=watched(FakeWork.wait)), with_values(Work, wait=watched(Work.wait)):
        yield


def reductions_watched(mode: RecordingMode) -> AbstractContextManager[None]:
    """Set `mode.reduce_op` to the reduction of each call of a process group."""
    names = [name for name in dir(ProcessGroup) if "reduce" in name and callable(getattr(ProcessGroup, name))]
    return with_values(ProcessGroup, **{name: _watched(getattr(ProcessGroup, name), mode) for name in names})


def _watched(method: Callable[..., Any], mode: RecordingMode) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with with_values(mode, reduce_op=_reduction((*args, *kwargs.values()))):
            return method(*args, **kwargs)

    return called


def _reduction(arguments: tuple[Any, ...]) -> str:
    """Return the name of the reduction among the arguments or their options; "" without any."""
    for one in arguments:
        reduction = getattr(one, "reduceOp", one if isinstance(one, dist.ReduceOp | dist.ReduceOp.RedOpType) else None)
        if reduction is not None:
            members = dist.ReduceOp.RedOpType.__members__.items()
            return next((name.lower() for name, member in members if reduction == member), "")
    return ""


def hold_results(mode: RecordingMode) -> None:
    """Make futures of collectives hold their outputs, permanently."""

    def future(work: Any) -> Arriving:
        return Arriving(mode.results_of(work), work)

    replace(FakeWork, "get_future", lambda _: future)


class Arriving(torch.futures.Future[Any]):
    """The result of a collective or of a callback."""

    _following: SimulatedStream | None = None
    """The stream of callbacks; None before the first."""

    def __init__(self, value: Any, work: Any = None) -> None:
        super().__init__()
        self.set_result(None)
        self._value, self._work = value, work

    def value(self) -> Any:
        """Return the result."""
        return self._value

    def wait(self) -> Any:
        """Make the current stream wait for it, and return the result."""
        if self._work is not None:
            self._work.wait()
        elif Arriving._following not in (None, device.current):
            device.current.wait_stream(Arriving._following)
        return self._value

    def then(self, callback: Callable[..., Any]) -> Any:
        """Return a future of the result of `callback`."""
        stream = Arriving._following = Arriving._following or SimulatedStream()
        with device.stream(stream):
            self.wait()
            for tensor in tree_leaves(self._value):
                if isinstance(tensor, Tensor) and tensor.device.type == NAME:
                    tensor.record_stream(stream)  # type: ignore[arg-type]
            return Arriving(callback(self))


_WITHOUT_FAKES = ("allreduce_coalesced_", "reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_")


def coalesce_collectives(mode: RecordingMode) -> None:
    """Make fake tensors work in coalesced collectives, whose wait waits for each of them, permanently."""
    missing = [
        name
        for name in _WITHOUT_FAKES
        if not getattr(torch.ops.c10d, name).default.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta)
    ]
    register_kernels("c10d", dict.fromkeys(missing, lambda *_, **__: FakeWork().boxed()), "Meta")
    started = list[int]()

    def start(_: ProcessGroup, __: torch.device) -> None:
        started.append(mode.recorder.num_works)
        mode.is_batch = True

    def end(_: ProcessGroup, __: torch.device) -> _Together:
        first = started.pop()
        mode.is_batch = bool(started)
        return _Together(mode.works_since(first))

    # The fake group itself would return an unrelated work.
    replace(ProcessGroup, "_start_coalescing", lambda _: start)
    replace(ProcessGroup, "_end_coalescing", lambda _: end)
    # A fake group runs the messages of a batch one by one.
    replace((dist, distributed_c10d), "batch_isend_irecv", with_values(mode, is_batch=True))


class _Together:
    """A Work object for several works."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *args: Any) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(*args)
        return True

    def is_completed(self) -> bool:
        """Return True: a trace has no time."""
        return True
