"""RecordingMode: records each operator that torch dispatches while it is active and that concerns the device.

It is above FakeTensorMode, which computes shapes only, or above nothing, so that results are real. Operators of DTensor
and of other tensors that wrap tensors, such as torchao's in float8, are not recorded themselves: they are dispatched
again as operators on what is wrapped.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.memory.managed_tensors import is_managed, managed_bytes
from meshwright.parallelism.torch_private.torch_dispatch import is_float8, only_views, signature_of, wraps_tensors
from meshwright.spec.trace.timeline import REPLICAS_MARK
from meshwright.spec.trace.trace import HOST_AXIS, NONE, OpPlace, RecordKind, Signature
from meshwright.tracer.numbers.operator_results import computed, is_of_the_host
from meshwright.tracer.numbers.program_numbers import ProgramNumbers
from meshwright.tracer.record.collective_ops import CollectiveCall, collective_of, wire_name
from meshwright.tracer.record.decompositions import GROUPED_MATMUL, PARTS, is_by_loop, run_by_loop
from meshwright.tracer.record.op_call import OpCall
from meshwright.tracer.record.simulated_device import SimulatedStream
from meshwright.tracer.record.trace_recorder import StorageNumbers, TraceRecorder
from meshwright.tracer.record.untraceable import refuse
from meshwright.tracer.torch_distributed.torch_async_tensor import JOINT, JOINT_AXIS
from meshwright.tracer.torch_distributed.torch_pipelining import StageMessages
from meshwright.tracer.torch_patches.torch_cuda import simulated
from meshwright.tracer.torch_patches.torch_names import with_values

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_WRAP = torch.ops._c10d_functional._wrap_tensor_autograd.default
_RECORD_STREAM = torch.ops.aten.record_stream.default
_IS_PINNED = torch.ops.aten.is_pinned.default
_COPY = torch.ops.aten._to_copy.default
_CONTIGUOUS = torch.ops.aten.contiguous.default
_FSDP = "FSDP::"
"""Prefix of torch's marks for the work of FSDP2 between modules."""
_READ_NUMBER = torch.ops.aten._local_scalar_dense.default
_ALIKE = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)


class RecordingMode(TorchDispatchMode):
    """Records operators, collectives, waits and storages on devices of one type."""

    def __init__(self, recorder: TraceRecorder, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.device_type = recorder, device_type
        self.storages = StorageNumbers(recorder)
        self._works: dict[int, tuple[Any, int]] = {}
        self._results: dict[int, list[weakref.ref[Tensor]]] = {}
        self._sent: dict[int, list[Tensor]] = {}
        self._host_waits: dict[int, int] = {}
        """Works for which the host waits, and the stream of each."""
        self._stream_of_host: int | None = None
        self.reduce_op = ""
        """The reduction of the c10d call under way."""
        self.is_batch = False
        """Whether a batch of collectives or messages is under way."""
        self._is_joint = False
        """Whether the parts of a fused matmul and collective are being recorded."""
        self._signatures: dict[Any, int] = {}
        self.numbers = ProgramNumbers(recorder, device_type)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch.compile refuses to run below other modes."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and self.device_type != "cpu":
            kwargs = {**kwargs, "device": simulated(kwargs["device"])}
        if any(wraps_tensors(kind) for kind in types):
            return NotImplemented
        if func is _IS_PINNED:
            # DistributedDataParallel asserts pinned memory, which is not simulated.
            return args[0].device.type == "cpu"
        if self.device_type != "cpu" and is_of_the_host(func, args, kwargs):
            return computed(func, args, kwargs)
        if func in _ALIKE and any(isinstance(one, FakeTensor) for one in args[:2]):
            return self.numbers.alike(args)
        if func.namespace == "profiler":
            return self._mark(func, args, kwargs)
        if func.namespace == "prim" or self.recorder.is_paused:
            return func(*args, **kwargs)
        if func is _READ_NUMBER:
            if args[0].device.type == self.device_type:
                self.recorder.record(RecordKind.HOST_SYNC)
            return self.numbers.number(args[0]) if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if func is _WRAP:
            return AsyncCollectiveTensor(args[0])
        if func is _WAIT:
            self._wait(args[0])
            # Fake mode would return a new tensor.
            return args[0] if isinstance(args[0], FakeTensor) else func(*args, **kwargs)
        if func is _CONTIGUOUS and is_float8(args[0]) and not args[0].is_contiguous():
            # Below autograd it reaches modes whole, and looks like a view.
            with self:
                return args[0].clone(memory_format=torch.contiguous_format)
        if func in PARTS:
            with self:
                return PARTS[func](*args, **kwargs)
        if func in JOINT:
            # Its parts are on a channel of their own.
            with self, with_values(self, _is_joint=True):
                return JOINT[func](*args, **kwargs)
        if func is GROUPED_MATMUL and self.device_type != "cpu" and is_by_loop(args[0]):
            with self:
                return run_by_loop(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            refuse(func, error, self.recorder.scopes)
        if not only_views(func):
            self._record(OpCall(func, args, kwargs, result))
        return self.numbers.of_copy(args[0], result) if func is _COPY else result

    def _mark(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow torch's record_function() marks."""
        if func._opname == "_record_function_enter_new":
            self.recorder.scopes.open(str(args[0]))
        elif func._opname == "_record_function_exit":
            self.recorder.scopes.close()
        return func(*args, **kwargs)

    def _record(self, call: OpCall) -> None:
        inputs, outputs, written = call.inputs, call.outputs, call.written_inputs()
        found = collective_of(call, self.reduce_op, is_batched=self.is_batch)
        if found is not None:
            written |= {id(tensor) for tensor in found.written}
        results = [*outputs, *(tensor for tensor in inputs if id(tensor) in written)]
        if found is None:
            self.numbers.readings.follow(call, results)
        else:
            taken = results if found.is_functional else found.written
            self.numbers.communicated(found, call.func._opname, inputs, taken)
        place = call.place(self.device_type)
        if found is None and place is None:
            return
        signature = self._signature(call, found, place)
        if found is None:
            self.recorder.record(RecordKind.OP, signature=signature)
        else:
            self._record_collective(call, found, signature, is_here=place not in (None, "host"))
        self._use((one, id(one) in written) for one in inputs)
        self._use((one, True) for one in outputs)
        if place == "to_host" and call.is_blocking:
            self.recorder.record(RecordKind.HOST_SYNC)

    def _signature(self, call: OpCall, found: CollectiveCall | None, place: OpPlace | None) -> int:
        """Return the position of a call's signature."""
        # Building a Signature for each call would dominate the time of tracing.
        more = () if found is None else (found.agreed, found.sends, found.receives)
        key = (place, *more, *call.key(self.device_type))
        position = self._signatures.get(key)
        if position is None:
            signature = call.signature(self.device_type)
            if found is not None:
                signature = signature.replace(
                    op=wire_name(call.func), agreed=found.agreed, sends=found.sends, receives=found.receives
                )
            elif place is not None:
                signature = signature.replace(place=place)
            position = self._signatures[key] = self.recorder.signatures.position(signature)
        return position

    def _use(self, tensors: Iterable[tuple[Tensor, bool]]) -> None:
        """Add to the newest record that it uses the device's tensors among these; True for those that it writes.

        Managed memory that stays on the host is not the device's.
        """
        for tensor, writes in tensors:
            if tensor.device.type == self.device_type and not is_managed(tensor):
                self.recorder.use(self.storages.follow(tensor.untyped_storage()), writes=writes)

    def kernel(self, signature: Signature, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Record a kernel that a compiler fused of several operators."""
        inputs, outputs = list(inputs), list(outputs)
        if (read := managed_bytes(inputs)) or managed_bytes(outputs):
            signature = signature.replace(managed_read_bytes=read, managed_written_bytes=managed_bytes(outputs))
        self.recorder.record(RecordKind.OP, signature=self.recorder.signatures.position(signature))
        self._use((one, False) for one in inputs)
        self._use((one, True) for one in outputs)

    def record_stream(self, tensor: Tensor, _: object) -> None:
        """Record that the allocator keeps memory until another stream has finished with it."""
        if tensor.device.type == self.device_type and not self.recorder.is_paused:
            self.kernel(signature_of(_RECORD_STREAM, [], [], is_causal=False), [tensor], [])

    def _record_collective(self, call: OpCall, found: CollectiveCall, signature: int, *, is_here: bool) -> None:
        work = self.recorder.new_work()
        is_on_host = not (is_here or found.is_barrier)
        more = {
            "signature": signature,
            "group": self._group_of(found, len(call.inputs), is_on_host=is_on_host),
            "peer": found.peer,
            "num_bytes": found.num_bytes,
            "work": work,
        }
        stream = self._host_stream() if is_on_host else self.recorder.stream
        with self.recorder.on(stream):
            self.recorder.record(found.kind, **more)
        if is_on_host or found.is_barrier:
            self._host_waits[work] = stream
        if found.is_functional and any(isinstance(tensor, FakeTensor) for tensor in call.inputs):
            # A real group keeps its inputs until the wait; a fake one releases them at once.
            self._sent[work] = call.inputs
        for tensor in call.outputs:
            self.storages.set_work(tensor, work)
        for leaf in tree_leaves(call.result):
            if isinstance(leaf, torch.ScriptObject):
                # Kept alive, so that the program waits for this object.
                waited = FakeWork.unbox(leaf)
                self._works[id(waited)] = (waited, work)
                # Weak references: the caller owns the results.
                self._results[id(waited)] = [weakref.ref(tensor) for tensor in found.written]

    def _group_of(self, found: CollectiveCall, num_inputs: int, *, is_on_host: bool) -> int:
        """Return the number of a collective's group; raises ValueError where it has no backend for the host."""
        if is_on_host and not found.serves_host:
            raise ValueError(
                "No backend type associated with device type cpu: the group's only backend is nccl, and the tensor is "
                'on the host: move it to the device, or make the group with backend="cpu:gloo,cuda:nccl"'
            )
        if found.group is None:
            return NONE
        ranks, axis = found.group
        # A c10d gather or scatter has one more input than outputs.
        if not axis and not is_on_host and 0 < len(found.written) == num_inputs:
            axis = self._axis_of_all_reduce()
        return self.recorder.groups.position((ranks, self._marked(axis, found.communicator, is_on_host=is_on_host)))

    def _axis_of_all_reduce(self) -> str:
        """Return the axis of an all-reduce in a nameless group: those of FSDP2 and of ReplicaSums are over replicas."""
        return "dp_replicate" if self.recorder.scopes.scope.startswith((_FSDP, REPLICAS_MARK)) else ""

    def _marked(self, axis: str, communicator: str, *, is_on_host: bool) -> str:
        """Return the axis of a group with the marks of separate channels.

        CPU tensors use another backend, fused operations none.
        """
        axis = "pp" if StageMessages.is_under_way else axis
        marks = (axis, communicator, HOST_AXIS if is_on_host else "", JOINT_AXIS if self._is_joint else "")
        return " ".join(filter(None, marks))

    def _wait(self, tensor: Tensor) -> None:
        work = self.storages.work_of(tensor)
        self._record_wait(work)
        self._sent.pop(work, None)

    def waited(self, work: Any) -> None:
        """Record that the current stream waits for one of torch's Work objects."""
        _, number = self._works.pop(id(work), (None, NONE))
        self._results.pop(id(work), None)
        if number != NONE:
            self._record_wait(number)

    def _record_wait(self, work: int) -> None:
        """Record that the current stream waits for a work; for a barrier or CPU tensors the host does."""
        if work not in self._host_waits:
            self.recorder.record(RecordKind.WAIT, work=work)
            return
        with self.recorder.on(self._host_waits.pop(work)):
            self.recorder.record(RecordKind.WAIT, work=work)
            self.recorder.record(RecordKind.HOST_SYNC)

    def _host_stream(self) -> int:
        """Return the stream of CPU communication, separate from the device's streams."""
        if self._stream_of_host is None:
            self._stream_of_host = SimulatedStream().stream_id
        return self._stream_of_host

    def sent_since(self, work: int) -> list[Tensor]:
        """Return the inputs that collectives from number `work` on keep until their waits."""
        return [tensor for number, tensors in self._sent.items() if number >= work for tensor in tensors]

    def results_of(self, work: Any) -> list[Tensor]:
        """Return the outputs of the pending collective of a Work object."""
        return [tensor for one in self._results.get(id(work), ()) if (tensor := one()) is not None]

    def works_since(self, work: int) -> list[Any]:
        """Return the Work objects of pending collectives from number `work` on."""
        return [waited for waited, number in self._works.values() if number >= work]

    def unsettled(self) -> tuple[int, ...]:
        """Return the numbers of pending collectives, and of tensors with known numbers."""
        return len(self._works), len(self._host_waits), len(self._sent), self.numbers.readings.num_put
