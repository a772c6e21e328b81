"""Which reduction a collective asks for: torch hands it to the operator in an object that Python cannot read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from meshwright.tracer.record.recording_mode import RecordingMode


@contextmanager
def reductions_watched(mode: RecordingMode) -> Iterator[None]:
    """Have `mode.reduce_op` name the reduction of each call of a process group's methods that reduce."""
    names = [name for name in dir(ProcessGroup) if "reduce" in name and callable(getattr(ProcessGroup, name))]
    originals = {name: getattr(ProcessGroup, name) for name in names}
    for name, method in originals.items():
        setattr(ProcessGroup, name, _watched(method, mode))
    try:
        yield
    finally:
        for name, method in originals.items():
            setattr(ProcessGroup, name, method)


def _watched(method: Callable[..., Any], mode: RecordingMode) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        mode.reduce_op = _reduction((*args, *kwargs.values()))
        try:
            return method(*args, **kwargs)
        finally:
            mode.reduce_op = ""

    return called


def _reduction(arguments: tuple[Any, ...]) -> str:
    """Return the name of the reduction that is among the arguments, or in their options; "" where there is none."""
    for one in arguments:
        reduction = getattr(one, "reduceOp", one if isinstance(one, dist.ReduceOp | dist.ReduceOp.RedOpType) else None)
        if reduction is not None:
            members = dist.ReduceOp.RedOpType.__members__.items()
            return next((name.lower() for name, member in members if reduction == member), "")
    return ""
