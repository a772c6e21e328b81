"""GraphCall: the records of one call of a compiled graph, replayed for later equal calls without running the graph.

The blocks of a stage share their compiled graphs, and each microbatch calls them again. The records of a call depend
only on its arguments: dtypes, strides, aliasing, and numbers among them. Calls that agree in these (`key_of`) are
replayed. A replay has the scope, phase, action, line, stream, works and storages of its own call. Tensors that a graph
makes and frees are storages without a tensor; tensors that outlive the call are created. Arguments are released between
the same records, so storages that only the graph still held are freed there.

`Capture.finish` returns None for a call that cannot be replayed: one that waits for a collective of another call, waits
on the host, or returns an alias of memory whose strides it does not own. Such calls run each time.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.spec.trace.trace import NONE, RecordKind
from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.record.trace_recorder import TraceRecorder
from meshwright.tracer.torch_patches.torch_names import with_values

_OWN = ("scope", "phase", "action", "line", "stream")
"""Columns whose values depend on the call, equal for all its records."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_REPEATED = ("kind", "signature", "group", "peer", "num_bytes")


def key_of(args: Sequence[Any], mode: RecordingMode) -> Hashable | None:
    """Return the key that calls with equal records share; None if it is unknown."""
    first: dict[int, int] = {}
    parts: list[Hashable] = []
    for index, arg in enumerate(args):
        if not isinstance(arg, Tensor):
            # Numbers, and objects that graphs pass to operators, such as a mesh.
            if isinstance(arg, _SYMBOLIC) or not isinstance(arg, Hashable):
                return None
            parts.append(arg)
            continue
        if not isinstance(arg, FakeTensor):
            return None
        storage = arg.untyped_storage()
        shape, strides, offset = tuple(arg.shape), arg.stride(), arg.storage_offset()
        if not all(isinstance(size, int) for size in (*shape, *strides, offset)):
            return None
        number = mode.storages.number_of(storage)
        if number is None and arg.device.type == mode.device_type:
            return None
        alias = first.setdefault(storage._cdata, index)
        has_numbers = mode.numbers.readings.numbers(arg) is not None
        parts.append((alias, arg.dtype, arg.device, shape, strides, offset, has_numbers))
    return tuple(parts)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that outlives the call."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    slot: int
    """Its storage, among those of the call."""
    work: int
    """The collective of the call that wrote it last; -1 for none."""


@dataclass(frozen=True)
class Step:
    """A record, with the storages freed before it, and those allocated and used; the last step has no record."""

    freed: tuple[int, ...]
    """Slots: positions among the call's storages."""
    released: tuple[int, ...]
    """Positions of arguments that the graph releases."""
    record: tuple[tuple[str, int], ...]
    work: int
    """The work of the call that it starts or waits for; -1 for none."""
    is_forward: bool
    """Whether it is part of a forward, which is recomputation in a backward."""
    allocated: tuple[tuple[int, int], ...]
    """Slots, and their bytes."""
    uses: tuple[tuple[int, int], ...]
    """Slots, or arguments as -1 - position, and 1 for writes."""


@dataclass(frozen=True)
class GraphCall:
    """The records of one call."""

    num_works: int
    steps: tuple[Step, ...]
    made: tuple[tuple[fx.Node, Any], ...]
    """Values of nodes; tensors among them as SavedTensor."""

    def replay(self, mode: RecordingMode, inputs: list[Any]) -> dict[fx.Node, Any]:
        """Record the call on `inputs`, setting released ones to None; return the nodes' values."""
        recorder = mode.recorder
        own = _own_values(recorder, {step.is_forward for step in self.steps if step.record})
        numbers = [
            mode.storages.number_of(one.untyped_storage()) if isinstance(one, Tensor) else NONE for one in inputs
        ]
        works = [recorder.new_work() for _ in range(self.num_works)] + [NONE]
        slots: dict[int, int] = {}
        for step in self.steps:
            for slot in step.freed:
                recorder.free(slots[slot])
            for position in step.released:
                inputs[position] = None
            if step.record:
                recorder.append({**own[step.is_forward], **dict(step.record), "work": works[step.work]})
            for slot, num_bytes in step.allocated:
                slots[slot] = recorder.allocate(num_bytes, by_newest=True)
            for thing, writes in step.uses:
                used = slots[thing] if thing >= 0 else numbers[NONE - thing]
                assert used is not None
                recorder.use(used, writes=bool(writes))
        return self._tensors(mode, slots, works)

    def _tensors(self, mode: RecordingMode, slots: dict[int, int], works: list[int]) -> dict[fx.Node, Any]:
        tensors: dict[SavedTensor, Tensor] = {}

        def tensor_of(made: SavedTensor) -> Tensor:
            if made not in tensors:
                tensors[made] = torch.empty_strided(made.size, made.strides, dtype=made.dtype, device=made.device)
                mode.storages.adopt(tensors[made], slots[made.slot], works[made.work])
            return tensors[made]

        with mode.recorder.paused():
            return {node: tree_map_only(SavedTensor, tensor_of, value) for node, value in self.made}


class Capture:
    """Observes a running call without holding its tensors."""

    def __init__(self, mode: RecordingMode, args: Sequence[Any]) -> None:
        self._mode, self._start, self._before = mode, mode.recorder.mark(), mode.unsettled()
        self._own = _own_values(mode.recorder, {False, True})
        self._arguments: dict[int, list[int]] = {}
        self._numbers: dict[int, int] = {}
        for position, arg in enumerate(args):
            if isinstance(arg, Tensor):
                storage = arg.untyped_storage()
                self._arguments.setdefault(storage._cdata, []).append(position)
                number = mode.storages.number_of(storage)
                if number is not None:
                    self._numbers.setdefault(number, position)
        self._released: dict[int, tuple[int, ...]] = {}
        self._is_forward: list[bool] = []

    def after_kernel(self, values: dict[fx.Node, Any], *, is_forward: bool) -> None:
        """Assign the new records to a kernel, and find the arguments that are no longer among `values`."""
        num_records = len(self._mode.recorder) - self._start.records
        self._is_forward += [is_forward] * (num_records - len(self._is_forward))
        held = {tensor.untyped_storage()._cdata for tensor in _tensors_in(values.values())}
        held |= {tensor.untyped_storage()._cdata for tensor in self._mode.sent_since(self._start.works)}
        gone = [key for key in self._arguments if key not in held]
        positions = [position for key in gone for position in self._arguments.pop(key)]
        self._released[num_records] = (*self._released.get(num_records, ()), *positions)

    def kept(self, values: dict[fx.Node, Any], results: Collection[fx.Node]) -> list[tuple[fx.Node, Any]] | None:
        """Return those of `values` that a replay has to create: `results`, and others with memory of their own.

        None if one of them is an alias of a part of its storage.
        """
        found: list[tuple[fx.Node, Any]] = []
        by_slot: dict[int, SavedTensor] = {}
        for node in sorted(values, key=lambda one: one not in results):
            tensors = _tensors_in([values[node]])
            has_own = any(self._slot(tensor) >= 0 and self._slot(tensor) not in by_slot for tensor in tensors)
            if node.op == "placeholder" or not (node in results or has_own):
                continue
            made = [self._made(tensor) for tensor in tensors]
            if any(one is None or by_slot.setdefault(one.slot, one) != one for one in made):
                return None
            if any(isinstance(leaf, _SYMBOLIC) for leaf in tree_leaves(values[node])):
                return None
            found.append((node, tree_map_only(Tensor, self._made, values[node])))
        return found

    def _slot(self, tensor: Tensor) -> int:
        """Return the call's storage that a tensor is in; negative for others."""
        number = self._mode.storages.number_of(tensor.untyped_storage())
        return NONE if number is None else number - self._start.storages

    def _made(self, tensor: Tensor) -> SavedTensor | None:
        """Return how a replay creates a tensor; None if it is an alias of a part, or not of this call."""
        slot, work = self._slot(tensor), self._mode.storages.work_of(tensor)
        size, strides = tuple(tensor.shape), tensor.stride()
        extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))
        is_whole = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == extent * tensor.itemsize
        if slot < 0 or not is_whole or 0 <= work < self._start.works:
            return None
        return SavedTensor(size, strides, tensor.dtype, tensor.device, slot, max(work - self._start.works, NONE))

    def finish(self, made: list[tuple[fx.Node, Any]] | None) -> GraphCall | None:
        """Return the call, after its own values were released; None if it cannot be replayed."""
        if made is None or self._mode.unsettled() != self._before:
            return None
        since = self._mode.recorder.since(self._start)
        records, storages = since["records"], since["storages"]
        num_records = len(records["kind"])
        self._is_forward += [False] * (num_records - len(self._is_forward))
        outlive = {slot for slot, freed_at in enumerate(storages["freed_at"]) if freed_at == NONE}
        # Outputs that nothing reads, such as the mask of attention, were freed with the call's own values.
        read = [(node, tree_map_only(SavedTensor, partial(_if_in, outlive), value)) for node, value in made]
        made = [(node, value) for node, value in read if _slots_of([value])]
        if outlive != _slots_of([value for _, value in made]):
            return None
        if not self._is_repeatable(records):
            return None
        uses: list[list[tuple[int, int]]] = [[] for _ in range(num_records + 1)]
        for record, storage, writes in zip(*since["uses"].values(), strict=True):
            slot = storage - self._start.storages
            if slot < 0 and storage not in self._numbers:
                return None
            uses[record - self._start.records].append((slot if slot >= 0 else NONE - self._numbers[storage], writes))
        steps = [self._step(at, records, storages, uses[at]) for at in range(num_records + 1)]
        return GraphCall(self._mode.recorder.num_works - self._start.works, tuple(steps), tuple(made))

    def _is_repeatable(self, records: dict[str, list[int]]) -> bool:
        """Return whether all records have the call's own values, and wait for its own works only."""
        own = (self._own[is_forward] for is_forward in self._is_forward)
        rows = zip(*(records[name] for name in _OWN), strict=True)
        return (
            all(row == tuple(values[name] for name in _OWN) for row, values in zip(rows, own, strict=True))
            and all(
                work >= self._start.works or (work == NONE and kind != RecordKind.WAIT)
                for kind, work in zip(records["kind"], records["work"], strict=True)
            )
            and all(event == NONE for event in records["event"])
            and RecordKind.HOST_SYNC not in records["kind"]
        )

    def _step(
        self, at: int, records: dict[str, list[int]], storages: dict[str, list[int]], uses: list[tuple[int, int]]
    ) -> Step:
        here, is_record = at + self._start.records, at < len(records["kind"])
        work = records["work"][at] if is_record else NONE
        made = enumerate(zip(storages["allocated_at"], storages["num_bytes"], strict=True))
        return Step(
            freed=tuple(slot for slot, freed_at in enumerate(storages["freed_at"]) if freed_at == here),
            released=self._released.get(at, ()),
            record=tuple((name, records[name][at]) for name in _REPEATED) if is_record else (),
            work=NONE if work == NONE else work - self._start.works,
            is_forward=is_record and self._is_forward[at],
            allocated=tuple((slot, num_bytes) for slot, (allocated_at, num_bytes) in made if allocated_at == here),
            uses=tuple(uses),
        )


def _own_values(recorder: TraceRecorder, kinds: Collection[bool]) -> dict[bool, dict[str, int]]:
    """Return a call's own columns for records of a forward, and for others."""
    found = {}
    for is_forward in kinds:
        with with_values(recorder.scopes, is_compiled_forward=is_forward):
            found[is_forward] = recorder.place(RecordKind.OP)
    return found


def _if_in(slots: Collection[int], one: SavedTensor) -> SavedTensor | None:
    return one if one.slot in slots else None


def _slots_of(values: list[Any]) -> set[int]:
    return {one.slot for one in tree_leaves(values) if isinstance(one, SavedTensor)}


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]
