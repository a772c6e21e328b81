"""Futures of collectives: what is to follow one runs when it has arrived, on a stream that torch takes for that.

Those of torch's fake works hold nothing. Real ones run what follows on a stream out of a pool, so that the stream which
computes does not wait; here that is one stream, on which what follows runs in the order in which it was asked for.
"""

# No future annotations: torch reads those of a hook.
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_leaves

from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.record.simulated_device import NAME, SimulatedStream, device
from meshwright.tracer.torch_patches.torch_names import replace


def hold_results(mode: RecordingMode) -> None:
    """Have the futures of collectives hold the tensors that these wrote to, for good."""

    def future(work: Any) -> Arriving:
        return Arriving(mode.results_of(work), work)

    replace(FakeWork, "get_future", lambda _: future)


class Arriving(torch.futures.Future[Any]):
    """What a collective, or something that followed one, comes to."""

    _following: SimulatedStream | None = None
    """The stream of what follows collectives; None before the first."""

    def __init__(self, value: Any, work: Any = None) -> None:
        super().__init__()
        self.set_result(None)
        self._value, self._work = value, work

    def value(self) -> Any:
        """Return what it came to."""
        return self._value

    def wait(self) -> Any:
        """Have the current stream wait for it, and return what it came to."""
        if self._work is not None:
            self._work.wait()
        elif Arriving._following not in (None, device.current):
            device.current.wait_stream(Arriving._following)
        return self._value

    def then(self, callback: Callable[..., Any]) -> Any:
        """Return what `callback` makes of this future."""
        stream = Arriving._following = Arriving._following or SimulatedStream()
        with device.stream(stream):
            self.wait()
            for tensor in tree_leaves(self._value):
                if isinstance(tensor, Tensor) and tensor.device.type == NAME:
                    tensor.record_stream(stream)  # type: ignore[arg-type]
            return Arriving(callback(self))
