"""simgpu: an accelerator in Python only, whose streams and events are recorded and do nothing else.

torch lets one backend be written in Python (torch.utils.backend_registration, private and experimental; checked in 2.11
to 2.15) and queries it, like torch.cuda, for streams, events and the current device. It cannot be unregistered, so a
trace is made in a process of its own.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from meshwright.spec.trace.trace import RecordKind
from meshwright.tracer.record.trace_recorder import TraceRecorder

NAME = "simgpu"
_STATE_BYTES = 16

H100 = SimpleNamespace(
    type="cuda",
    index=0,
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    total_memory=80 << 30,
    gcnArchName="",
)
"""Properties that programs and compilers query: compute capability 9.0."""


class SimulatedEvent:
    """An event: a position in a stream that another stream, or the host, can wait for."""

    _numbers = itertools.count()

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = next(SimulatedEvent._numbers)

    def record(self, stream: SimulatedStream | None = None) -> None:
        device.on(stream, RecordKind.RECORD_EVENT, event=self.number)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        device.on(stream, RecordKind.WAIT_EVENT, event=self.number)

    def synchronize(self) -> None:
        device.on(None, RecordKind.HOST_SYNC, event=self.number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: SimulatedEvent) -> float:
        return 0.0


class SimulatedStream:
    """A stream: its operations run in order."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id, self.priority = next(SimulatedStream._numbers), priority
        # A number, as in torch's own streams.
        self.device_index, self.device_type = 0, torch._C._autograd.DeviceType.PrivateUse1.value

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def wait_event(self, event: SimulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        device.on(self, RecordKind.HOST_SYNC)

    def query(self) -> bool:
        return True

    def __enter__(self) -> SimulatedStream:
        self._before = device.current
        device.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        device.set_stream(self._before)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id


def always(value: object) -> Callable[..., Any]:
    """Return a new function that returns `value`, as method too; torch's compiler has rules for each object by name."""
    return lambda *_, **__: value


class SimulatedDevice:
    """The module torch.simgpu, with the functions that torch expects of a device module such as torch.cuda."""

    def __init__(self) -> None:
        self.recorder: TraceRecorder | None = None
        self.Stream, self.Event = SimulatedStream, SimulatedEvent
        self.current = self.default = SimulatedStream()
        self.is_capturing = False
        self.num_devices = 1
        """Devices of the process's node, of which it uses index 0."""

    def on(self, stream: SimulatedStream | None, kind: RecordKind, event: int = -1) -> None:
        """Record an event operation on a stream, by default the current one."""
        if self.recorder is None:
            return
        with self.recorder.on((stream or self.current).stream_id):
            self.recorder.record(kind, event=event)

    is_available, is_initialized, is_bf16_supported = always(value=True), always(value=True), always(value=True)
    _is_in_bad_fork, current_device = always(value=False), always(0)
    get_device_capability, get_device_properties = always((H100.major, H100.minor)), always(H100)
    get_device_name, get_amp_supported_dtype = always(H100.name), always([torch.bfloat16, torch.float16])
    set_device, empty_cache, ipc_collect = always(None), always(None), always(None)
    manual_seed, manual_seed_all, seed, seed_all = always(None), always(None), always(None), always(None)
    set_rng_state, set_rng_state_all = always(None), always(None)

    def device_count(self) -> int:
        return self.num_devices

    @contextmanager
    def device(self, _: Any) -> Iterator[None]:
        yield

    def current_stream(self, _: Any = None) -> SimulatedStream:
        return self.current

    def default_stream(self, _: Any = None) -> SimulatedStream:
        return self.default

    def set_stream(self, stream: SimulatedStream) -> None:
        self.current = stream
        if self.recorder is not None:
            self.recorder.stream = stream.stream_id

    def stream(self, stream: SimulatedStream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else stream

    def synchronize(self, _: Any = None) -> None:
        self.on(None, RecordKind.HOST_SYNC)

    def get_rng_state(self, _: Any = None) -> torch.Tensor:
        return torch.zeros(_STATE_BYTES, dtype=torch.uint8)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def memory_allocated(self, _: Any = None) -> int:
        return 0 if self.recorder is None else self.recorder.live_bytes

    def max_memory_allocated(self, _: Any = None) -> int:
        return 0 if self.recorder is None else self.recorder.peak_bytes

    def memory_reserved(self, _: Any = None) -> int:
        return self.memory_allocated()

    def max_memory_reserved(self, _: Any = None) -> int:
        return self.max_memory_allocated()

    def mem_get_info(self, _: Any = None) -> tuple[int, int]:
        return H100.total_memory - self.memory_allocated(), H100.total_memory

    def memory_stats(self, _: Any = None) -> dict[str, int]:
        now, peak = self.memory_allocated(), self.max_memory_allocated()
        stats = collections.defaultdict[str, int](int)
        for kind in ("allocated", "active", "reserved"):
            stats |= {f"{kind}_bytes.all.current": now, f"{kind}_bytes.all.peak": peak}
        return stats

    def memory_summary(self, *_: Any, **__: Any) -> str:
        return f"{self.memory_allocated()} bytes allocated, {self.max_memory_allocated()} at most"

    def reset_peak_memory_stats(self, _: Any = None) -> None:
        if self.recorder is not None:
            self.recorder.peak_bytes = self.recorder.live_bytes

    def reset_max_memory_allocated(self, _: Any = None) -> None:
        self.reset_peak_memory_stats()


device = SimulatedDevice()


def install(recorder: TraceRecorder) -> None:
    """Make simgpu torch's accelerator in this process, permanently, with "fake" as its collective backend."""
    device.recorder = recorder
    _setup_privateuseone_for_python_backend(NAME, backend_module=device)
    dist.Backend.backend_capability["fake"].append(NAME)
    dist.Backend.default_device_backend_map[NAME] = "fake"
