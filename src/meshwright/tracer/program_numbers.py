"""ProgramNumbers: what a program reads of tensors while it is traced, and the lines that decide by a guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshwright.spec.trace import RecordKind
from meshwright.tracer.guessed_number import GuessedNumber
from meshwright.tracer.host_numbers import is_whole, is_whole_on_host, numbers_of, tensor_of
from meshwright.tracer.program_lines import line_of_program
from meshwright.tracer.readings import Reading, Readings
from meshwright.tracer.recorder import Recorder
from meshwright.tracer.untraceable import refuse_number

_MOST_KNOWN = 1 << 16
"""Integers of one tensor on the device that are known, such as a state of random numbers that ranks broadcast."""


class ProgramNumbers:
    """Numbers of tensors as a program reads them; reads of the device are recorded."""

    def __init__(self, recorder: Recorder, device_type: str) -> None:
        self._recorder, self._device_type = recorder, device_type
        self.readings = Readings()
        self.guesses: dict[str, str] = {}
        """By line of the program what it read and decided by, where that was a guess."""

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether the numbers in a tensor are known, one by one."""
        return self.readings.numbers(tensor) is not None

    def know(self, tensor: Tensor, numbers: list[Any]) -> None:
        """Keep the numbers that the program itself put into a tensor, until an operator writes to it."""
        self.readings.put(tensor, numbers)

    def of_copy(self, source: Tensor, copy: Any) -> Any:
        """Return a copy of a tensor, with the integers that are known of it: on the host it is a real tensor again."""
        if not copy.is_contiguous() or copy.numel() > _MOST_KNOWN or not is_whole(copy.dtype):
            return copy
        if is_whole_on_host(source):
            self.know(copy, numbers_of(source))
        known = self.readings.numbers(source)
        if known is None or copy.device.type != "cpu" or not source.is_contiguous():
            return copy
        first = int(source.storage_offset())
        return tensor_of(list(known[first : first + copy.numel()]), copy)

    def read(self, tensor: Tensor) -> None:
        """Record that the host reads a whole tensor."""
        if tensor.device.type == self._device_type != "cpu":
            tensor.to("cpu")

    def number(self, tensor: Tensor, place: int = 0) -> float | int | bool:
        """Return what a number of a tensor reads as; raises UnsupportedError for a whole number that is unknown.

        A boolean that is a guess is noted: programs read those to decide by them.
        """
        reading = self.readings.read(tensor, place)
        if reading is None:
            refuse_number(self._recorder.scopes)
        if reading.is_guess and isinstance(reading.value, bool):
            self.guessed(reading.value)
        return reading.value

    def guessed(self, value: float | bool) -> None:
        """Note that the program decides by a number that is a guess, and where."""
        if not self._recorder.is_paused and (line := line_of_program()):
            self.guesses.setdefault(line, f"{value:g}" if type(value) is not bool else str(value))

    def item(self, tensor: Tensor) -> float | int | bool:
        """Return what a tensor's only number reads as; a fraction that is a guess tells when it decides."""
        reading, value = self.readings.read(tensor), Tensor.item(tensor)
        return self._watched(value, reading)

    def element(self, tensor: Tensor, place: int) -> float | int | bool:
        """Return `number`; a fraction that is a guess tells when it decides."""
        return self._watched(self.number(tensor, place), self.readings.read(tensor, place))

    def _watched(self, value: float | int | bool, reading: Reading | None) -> float | int | bool:
        is_guess = reading is not None and reading.is_guess and type(value) is float
        return GuessedNumber.of(value, self.guessed) if is_guess else value

    def is_unknown(self, tensor: Tensor) -> bool:
        """Return whether a tensor holds whole numbers that the program did not put there."""
        return self.readings.read(tensor) is None

    def alike(self, tensors: Sequence[Tensor]) -> bool:
        """Return True, a guess: that two tensors are alike is what programs that compare them want to be sure of."""
        if tensors[0].device.type == self._device_type:
            self._recorder.record(RecordKind.HOST_SYNC)
        self.guessed(value=True)
        return True
