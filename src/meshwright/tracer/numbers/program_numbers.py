"""ProgramNumbers: the numbers that a traced program reads from tensors, and the lines that branch on a guess."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.spec.trace.trace import RecordKind
from meshwright.tracer.numbers.number_exchange import NumberExchange, Numbers
from meshwright.tracer.numbers.operator_results import (
    Reading,
    is_whole,
    is_whole_on_host,
    numbers_of,
    tensor_of,
    write_numbers,
)
from meshwright.tracer.numbers.readings import Readings
from meshwright.tracer.numbers.scalar_placeholders import GuessedNumber
from meshwright.tracer.programs.program_lines import line_of_program
from meshwright.tracer.record.collective_ops import CollectiveCall
from meshwright.tracer.record.trace_recorder import TraceRecorder
from meshwright.tracer.record.untraceable import refuse_number

_MOST_KNOWN = 1 << 16
"""Limit of known integers per device tensor, such as an RNG state that ranks broadcast."""

_MOST_EXCHANGED = 1 << 12
"""Limit of numbers per collective that ranks exchange: sizes, counts and flags."""


class ProgramNumbers:
    """Values that a program reads from tensors; reads from the device are recorded."""

    def __init__(self, recorder: TraceRecorder, device_type: str) -> None:
        self._recorder, self._device_type = recorder, device_type
        self.readings = Readings()
        self.exchange = NumberExchange()
        self.guesses: dict[str, str] = {}
        """By line of the program the assumed value on which it branched."""

    def of_copy(self, source: Tensor, copy: Any) -> Any:
        """Return a copy of a tensor with its known integers: a real tensor if it is on the host."""
        if not copy.is_contiguous() or copy.numel() > _MOST_KNOWN or not is_whole(copy.dtype):
            return copy
        if is_whole_on_host(source):
            self.readings.put(copy, numbers_of(source))
        known = self.readings.numbers(source)
        if known is None or copy.device.type != "cpu" or not source.is_contiguous():
            return copy
        first = int(source.storage_offset())
        return tensor_of(list(known[first : first + copy.numel()]), copy)

    def communicated(self, found: CollectiveCall, op: str, inputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Update the numbers that a collective or message, the operator `op`, writes."""
        if self.exchange.is_on and not found.is_barrier:
            contributed = inputs if found.is_in_place else [one for one in inputs if not _is_among(one, written)]
            taken = self.exchange.result_of(found, op, dist.get_rank(), self._contributed(contributed))
            if taken is not None and self._is_put(written, taken):
                return
        times = found.num_ranks if "sum" in found.agreed else 1
        self.readings.communicated(inputs, written, times, is_in_place=found.is_in_place)

    def _contributed(self, tensors: Sequence[Tensor]) -> Numbers | None:
        """Return the concatenated numbers of tensors; None if some are unknown, or if there are too many."""
        if not tensors or sum(one.numel() for one in tensors) > _MOST_EXCHANGED:
            return None
        found = [self._numbers(one) for one in tensors]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        values = tuple(value for one in known for value in one.values)
        return Numbers(values, any(one.is_guess for one in known), all(one.is_uniform for one in known))

    def _numbers(self, tensor: Tensor) -> Numbers | None:
        if is_whole_on_host(tensor):
            return Numbers(tuple(numbers_of(tensor)), is_guess=False)
        return self.readings.followed(tensor)

    def _is_put(self, written: Sequence[Tensor], numbers: Numbers) -> bool:
        """Write concatenated numbers to tensors in their dtypes; return whether the sizes fit."""
        if sum(one.numel() for one in written) != len(numbers.values):
            return False
        first = 0
        for one in written:
            values = [_in_dtype(value, one.dtype) for value in numbers.values[first : first + one.numel()]]
            first += one.numel()
            if is_whole_on_host(one):
                write_numbers(one, values)
            else:
                self.readings.put_into(one, values, is_uniform=numbers.is_uniform, is_guess=numbers.is_guess)
        return True

    def read(self, tensor: Tensor) -> None:
        """Record that the host reads a whole tensor."""
        if tensor.device.type == self._device_type != "cpu":
            tensor.to("cpu")

    def number(self, tensor: Tensor, place: int = 0) -> float | int | bool:
        """Return one value of a tensor; raises UnsupportedError for an unknown integer.

        A guessed boolean or integer is recorded: programs read those to branch on them.
        """
        reading = self.readings.read(tensor, place)
        if reading is None:
            refuse_number(self._recorder.scopes)
        if reading.is_guess and isinstance(reading.value, int):
            self.guessed(reading.value)
        return reading.value

    def guessed(self, value: float | bool) -> None:
        """Record that the program branches on a guess, and where."""
        if not self._recorder.is_paused and (line := line_of_program()):
            self.guesses.setdefault(line, f"{value:g}" if isinstance(value, float) else str(value))

    def item(self, tensor: Tensor) -> float | int | bool:
        """Return the value of a tensor of one element; a guessed float records comparisons."""
        reading, value = self.readings.read(tensor), Tensor.item(tensor)
        return self._watched(value, reading)

    def element(self, tensor: Tensor, place: int) -> float | int | bool:
        """Return `number`; a guessed float records comparisons."""
        return self._watched(self.number(tensor, place), self.readings.read(tensor, place))

    def _watched(self, value: float | int | bool, reading: Reading | None) -> float | int | bool:
        is_guess = reading is not None and reading.is_guess and type(value) is float
        return GuessedNumber.of(value, self.guessed) if is_guess else value

    def is_unknown(self, tensor: Tensor) -> bool:
        """Return whether a tensor has integers that the program did not write."""
        return self.readings.read(tensor) is None

    def alike(self, tensors: Sequence[Tensor]) -> bool:
        """Return True, a guess: programs that compare tensors assert that they are equal."""
        if tensors[0].device.type == self._device_type:
            self._recorder.record(RecordKind.HOST_SYNC)
        self.guessed(value=True)
        return True


def _is_among(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _in_dtype(value: float | int | bool, dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return bool(value)
    return int(value) if is_whole(dtype) else float(value)
