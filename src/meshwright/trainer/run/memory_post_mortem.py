"""When an allocation fails: what the rank held by tensor class, next to the prediction, and the one key to change.

    parameters, gradients, optimizer states, buffers    counted, as storages of the model's and the optimizer's tensors
    communication    all-gathered parameters and unreduced gradients of FSDP2, counted
    activations      the rest of what the allocator gave out, or on a host of what became resident since the start:
                     what backward needs, logits, temporaries of the op at work
    unaccounted      of a device: the allocator's gaps, context, libraries, other processes; of a host: the process
                     before it built the model

On a host, memory that was asked for and not yet written is not resident, so that activations are at least that.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import asdict, dataclass, fields, replace
from types import TracebackType
from typing import Self

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import OutOfMemory
from meshwright.hardware.machine import resident_bytes
from meshwright.parallelism.torch_private.torch_dispatch import storage_bytes
from meshwright.parallelism.torch_private.torch_fsdp import unsharded_bytes
from meshwright.planner.explain.memory_advice import MemoryAdvice, memory_advice
from meshwright.spec.job.job import Job
from meshwright.spec.run.run import Run
from meshwright.spec.step.estimate import MemoryUse
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training
from meshwright.units import GiB, KiB, MiB, format_bytes, format_duration

_CPU_MESSAGE = "can't allocate memory"
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}


@dataclass(frozen=True)
class MemoryByClass:
    """Bytes of one rank by tensor class."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer_states: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0
    communication: float = 0.0
    unaccounted: float = 0.0


class MemoryPostMortem:
    """Context: turns a failed allocation into OutOfMemory, whose message ends with the table."""

    def __init__(self, job: Job, run: Run, ranks: Ranks) -> None:
        self._job, self._run, self._ranks = job, run, ranks
        self._training: Training | None = None
        self._resident_before = resident_bytes()

    def follow(self, training: Training) -> None:
        """Set the training whose tensors are counted; before, only what is predicted is known."""
        self._training = training

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or not is_out_of_memory(error):
            return
        # First, while all is there.
        present = None if self._training is None else self._present(self._training)
        snapshot = self._snapshot()
        traceback.clear_frames(trace)
        if self._training is not None:
            self._training.step.pipeline.forget_microbatches()
        raise OutOfMemory("\n".join(self._lines(error, present, snapshot))) from error

    def _present(self, training: Training) -> MemoryByClass:
        parameters, here = list(training.model.parameters()), self._ranks.device.type
        units = [stage for stage in training.model if isinstance(stage, FSDPModule)]
        counted = MemoryByClass(
            parameters=storage_bytes(parameters, here),
            gradients=storage_bytes([one.grad for one in parameters if one.grad is not None], here),
            optimizer_states=storage_bytes(training.optimizer.state_tensors, here),
            buffers=storage_bytes(training.model.buffers(), here),
            communication=sum(map(unsharded_bytes, units)),
        )
        allocated, rest = self._allocated()
        known = sum(asdict(counted).values())
        return replace(counted, activations=max(allocated - known, 0), unaccounted=rest)

    def _allocated(self) -> tuple[float, float]:
        """Return the bytes that tensors take, and those that the rank takes besides."""
        device = self._ranks.device
        if device.type != "cuda":
            return max(resident_bytes() - self._resident_before, 0), self._resident_before
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        return allocated, total - free - allocated

    def _snapshot(self) -> str | None:
        """Write the state of the device's allocator, and return a line about it; None on a host, which has none."""
        if self._ranks.device.type != "cuda":
            return None
        path = self._run.memory_snapshot(self._ranks.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except OSError as problem:
            return f"no snapshot of the allocator: cannot write {path}: {problem.strerror}"
        return f"{path} has the allocator's state: open it at https://pytorch.org/memory_viz"

    def _lines(self, error: BaseException, present: MemoryByClass | None, snapshot: str | None) -> list[str]:
        """Return the message: what failed, the table, the key to change."""
        words = str(error).strip().splitlines() or [type(error).__name__]
        lines = [f"rank {self._ranks.rank} of {self._ranks.num_ranks} is out of memory: {words[0]}"]
        try:
            advice: MemoryAdvice | None = self._advice(asked_bytes(error))
            reason = ""
        except Exception as problem:
            # Every exception, as those of own models and of memory that is missing: none may hide the one that counts.
            advice, reason = None, f"no prediction: {problem or type(problem).__name__}"
        lines += table_lines(None if advice is None else by_class(advice.rank), present)
        if snapshot is not None:
            lines.append(snapshot)
        return [*lines, reason if advice is None else change_line(advice, present)]

    def _advice(self, missing_bytes: float) -> MemoryAdvice:
        layout = self._ranks.layout_of(self._job)
        # Ranks of one pipeline stage follow each other.
        pp_rank = self._ranks.rank * layout.pp // self._ranks.num_ranks
        return memory_advice(self._job, layout, pp_rank, missing_bytes, self._ranks.device.type)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, of the device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_MESSAGE in str(error)


def asked_bytes(error: BaseException) -> float:
    """Return the bytes that the failed allocation asked for, 0 where the message does not say."""
    found = _ASKED.search(str(error))
    return 0.0 if found is None else float(found[1]) * _UNITS[found[2]]


def by_class(memory: MemoryUse) -> MemoryByClass:
    """Return a prediction in the classes of the table; the formulas count no buffers."""
    return MemoryByClass(
        parameters=memory.parameters_bytes,
        gradients=memory.gradients_bytes,
        optimizer_states=memory.optimizer_state_bytes,
        activations=memory.activations_bytes + memory.logits_bytes + memory.workspace_bytes,
        communication=memory.unsharded_parameters_bytes + memory.communication_buffers_bytes,
        unaccounted=memory.fragmentation_bytes + memory.context_bytes,
    )


def table_lines(predicted: MemoryByClass | None, present: MemoryByClass | None) -> list[str]:
    """Return a row for each class and one for all: predicted, present, difference; "-" for what is not known."""
    rows = [("", "predicted", "present", "difference")]
    for name in (*(field.name for field in fields(MemoryByClass)), "total"):
        sides = [None if side is None else _of_class(side, name) for side in (predicted, present)]
        known = [side for side in sides if side is not None]
        difference = f"{_signed(known[1] - known[0])}" if len(known) == 2 else "-"
        one, other = ("-" if side is None else format_bytes(side) for side in sides)
        rows.append((name.replace("_", " "), one, other, difference))
    return [f"  {name:<18}{one:>12}{other:>12}{difference:>13}" for name, one, other, difference in rows]


def change_line(advice: MemoryAdvice, present: MemoryByClass | None = None) -> str:
    """Return the key to change, as the planner predicts it, with what is unaccounted `present` where that is known."""
    beyond = 0.0 if present is None else present.unaccounted - by_class(advice.rank).unaccounted
    now = f"{format_bytes(advice.memory_bytes + beyond)} and {format_duration(advice.step_s)} a step"
    if advice.smaller is None:
        return f"no single key of [layout] is predicted to free enough of {now}: take more ranks, or `meshwright plan`"
    taken, step_s = format_bytes(advice.smaller.memory_bytes + beyond), format_duration(advice.smaller.step_s)
    counted = ", what is unaccounted included" if present is not None and present.unaccounted else ""
    return (
        f"set {advice.smaller.section}.{advice.smaller.change}: predicted to take {taken} and {step_s} a step in place "
        f"of {now}{counted}"
    )


def _of_class(memory: MemoryByClass, name: str) -> float:
    values: dict[str, float] = asdict(memory)
    return sum(values.values()) if name == "total" else values[name]


def _signed(num_bytes: float) -> str:
    return f"{'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"
