"""Readings: the values that a program reads from fake tensors, as in a healthy step.

    written       numbers that the program wrote to a tensor are kept, and constants such as zeros(2) are propagated
                  through copies, arithmetic, comparisons, reductions and collectives
    floats        otherwise 1, a guess; results of known numbers are computed from them
    comparisons   are computed from the values read; booleans of unknown operands are False, a guess
    tests         for non-finite numbers are False, and no guess: all numbers of a healthy step are finite
    integers      that the program did not write are unknown: they become sizes, which cannot be guessed

Where numbers are not exchanged between ranks (number_exchange.py), others are assumed to contribute the same as this
rank, so that a sum over ranks is a multiple.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from meshwright.tracer.numbers.number_exchange import Numbers
from meshwright.tracer.numbers.operator_results import (
    Kind,
    Reading,
    constant_of,
    in_dtype,
    kind_of,
    multiplied,
    run_on,
)
from meshwright.tracer.record.op_call import OpCall

_FOLLOWED = 64
"""Elements of the largest tensor that is followed: counts and metrics, not weights."""
_FINITE_TESTS = ("isnan", "isinf", "isneginf", "isposinf")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class _Kept(NamedTuple):
    """The known numbers of a storage."""

    numbers: Sequence[Any]
    """All of them, or a single one if all are equal."""
    is_uniform: bool
    is_guess: bool
    storage: weakref.ref[torch.UntypedStorage]


class Readings:
    """Numbers of tensors, by their storages."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self.num_put = 0
        """Tensors among them with individual numbers."""

    def put(self, tensor: Tensor, numbers: Sequence[Any]) -> None:
        """Keep the numbers that the program wrote to a whole storage, until an operator writes to it."""
        self._keep(tensor, numbers, is_uniform=False, is_guess=False)

    def numbers(self, tensor: Tensor) -> Sequence[Any] | None:
        """Return the individual numbers of a tensor's storage; None if unknown or uniform."""
        kept = self._kept.get(_key(tensor))
        return None if kept is None or kept.is_uniform else kept.numbers

    def followed(self, tensor: Tensor) -> Numbers | None:
        """Return the numbers of a followed tensor in row-major order; None for others."""
        kept = self._kept.get(_key(tensor))
        if kept is None:
            return None
        places = range(tensor.numel())
        values = [kept.numbers[0 if kept.is_uniform else _in_storage(tensor, place)] for place in places]
        return Numbers(tuple(values), kept.is_guess, kept.is_uniform)

    def put_into(self, tensor: Tensor, values: Sequence[Any], *, is_uniform: bool, is_guess: bool) -> None:
        """Keep numbers written to a tensor, in row-major order; of a view the rest of the storage has to be known."""
        size, kept = tensor.untyped_storage().nbytes() // tensor.itemsize, self._kept.get(_key(tensor))
        if tensor.numel() == size and tensor.is_contiguous():
            self._keep(tensor, values[:1] if is_uniform else values, is_uniform=is_uniform, is_guess=is_guess)
        elif kept is None:
            return
        else:
            numbers = list(kept.numbers) * (size if kept.is_uniform else 1)
            for place, value in enumerate(values):
                numbers[_in_storage(tensor, place)] = value
            self._keep(tensor, numbers, is_uniform=False, is_guess=is_guess or kept.is_guess)

    def read(self, tensor: Tensor, place: int = 0) -> Reading | None:
        """Return the reading of one element; None for an unknown integer."""
        kept = self._kept.get(_key(tensor))
        if kept is not None:
            return Reading(kept.numbers[0 if kept.is_uniform else _in_storage(tensor, place)], kept.is_guess)
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                return Reading(tensor.ravel()[place].item(), is_guess=False)
        if tensor.dtype == torch.bool:
            return Reading(value=False, is_guess=True)
        return Reading(1.0, is_guess=True) if tensor.dtype.is_floating_point else None

    def follow(self, call: OpCall, written: list[Tensor]) -> None:
        """Update the tensors that an operator wrote: new ones, and those among its inputs."""
        kind = kind_of(call.func)
        if kind == "kept" or not written:
            return
        if (numbers := self._one_by_one(call, written)) is not None:
            self._keep(written[0], numbers, is_uniform=False, is_guess=False)
            return
        reading = None if kind == "other" else self._computed(kind, call, written[0])
        self._set(written, reading)

    def communicated(
        self, inputs: Iterable[Tensor], written: Sequence[Tensor], times: int, *, is_in_place: bool
    ) -> None:
        """Update the results of a collective or message: `times` the contribution of each rank.

        The contribution is `written` in place, else the other inputs; without them the results are unknown.
        """
        if is_in_place:
            for one in written if times > 1 else ():
                self._multiply(one, times)
            return
        contributed = [one for one in inputs if not any(one is other for other in written)]
        reading = self._same(contributed) if self._is_followed(contributed) else None
        self._set(written, None if reading is None else multiplied(reading, times))

    def _computed(self, kind: Kind, call: OpCall, result: Tensor) -> Reading | None:
        """Return the reading of an operator's result, if it differs from the default of its dtype."""
        is_flag, inputs = result.dtype == torch.bool, call.inputs
        if not (is_flag or result.numel() <= _FOLLOWED) or not isinstance(result, FakeTensor):
            return None
        if kind == "constant":
            return constant_of(call, result)
        if not (is_flag and kind == "pointwise") and not self._is_followed(inputs):
            return None
        if kind == "pointwise":
            found = self._evaluated(call)
        else:
            sources = inputs[1:] if call.func._schema.name == "aten::copy_" else inputs
            found = self._same(sources)
            if found is not None and kind == "reduction":
                found = multiplied(found, inputs[0].numel() // max(result.numel(), 1))
        return found if found is None else in_dtype(found, result.dtype)

    def _one_by_one(self, call: OpCall, written: Sequence[Tensor]) -> list[Any] | None:
        """Return an operator's result for individual numbers; None if some are unknown or guesses."""
        if len(written) != 1 or written[0].numel() > _FOLLOWED or torch.Tag.nondeterministic_seeded in call.func.tags:
            return None
        if written[0].numel() * written[0].itemsize != written[0].untyped_storage().nbytes():
            return None
        if any(one is written[0] for one in call.inputs) or all(self.numbers(one) is None for one in call.inputs):
            return None
        values: dict[int, Any] = {}
        for one in call.inputs:
            found = self.followed(one) if one.numel() <= _FOLLOWED else None
            if found is None or found.is_guess:
                return None
            values[id(one)] = found.values
        return run_on(call, values)

    def _evaluated(self, call: OpCall) -> Reading | None:
        inputs = call.inputs
        readings = [self._reading_of_all(one) for one in inputs]
        values = [one.value for one in readings if one is not None]
        if len(values) < len(inputs):
            return None
        name = call.func._schema.name.removeprefix("aten::").rstrip("_")
        numbers = [one for one in (*call.args, *call.kwargs.values()) if isinstance(one, float | int)]
        is_guess = any(one is not None and one.is_guess for one in readings)
        is_test = any(not math.isfinite(one) for one in (*values, *numbers)) or (
            len(inputs) > 1 and inputs[0] is inputs[1]
        )
        if name in _FINITE_TESTS or (name in _COMPARISONS and is_test):
            is_guess = False
        made = run_on(call, dict(zip(map(id, inputs), values, strict=True)))
        value = None if made is None else made[0]
        # Results of a healthy step are finite if its inputs are.
        if value is None or not (math.isfinite(value) or is_test):
            return None
        return Reading(value, is_guess)

    def _same(self, tensors: Iterable[Tensor]) -> Reading | None:
        """Return the common reading of all elements of all tensors; None if they differ."""
        found = [self._reading_of_all(one) for one in tensors]
        readings = [one for one in found if one is not None]
        if len(readings) < len(found) or len({one.value for one in readings}) != 1:
            return None
        return readings[0]._replace(is_guess=any(one.is_guess for one in readings))

    def _reading_of_all(self, tensor: Tensor) -> Reading | None:
        """Return the common reading of all elements; None if they differ or are unknown."""
        numbers = self.numbers(tensor)
        if numbers is None:
            return self.read(tensor) if isinstance(tensor, FakeTensor) or tensor.numel() == 1 else None
        if tensor.numel() == 1:
            return Reading(numbers[int(tensor.storage_offset())], is_guess=False)
        return Reading(numbers[0], is_guess=False) if len(set(numbers)) == 1 else None

    def _is_followed(self, tensors: Iterable[Tensor]) -> bool:
        return any(_key(one) in self._kept for one in tensors)

    def _set(self, written: Sequence[Tensor], reading: Reading | None) -> None:
        for one in written:
            before, own = self._kept.get(_key(one)), reading if one.dtype == written[0].dtype else None
            if own is not None and one.numel() * one.itemsize == one.untyped_storage().nbytes():
                self._keep(one, [own.value], is_uniform=True, is_guess=own.is_guess)
            elif before is not None and not (own and before.is_uniform and before.numbers[0] == own.value):
                # After a partial write the elements would read differently.
                self._drop(_key(one))

    def _multiply(self, tensor: Tensor, times: int) -> None:
        kept = self._kept.get(_key(tensor))
        if kept is not None and tensor.dtype != torch.bool:
            numbers = [one * times for one in kept.numbers]
            self._kept[_key(tensor)] = kept._replace(numbers=numbers)

    def _keep(self, tensor: Tensor, numbers: Sequence[Any], *, is_uniform: bool, is_guess: bool) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        self._drop(key)
        alive = weakref.ref(storage, lambda _: self._drop(key))
        self._kept[key] = _Kept(numbers, is_uniform, is_guess, alive)
        self.num_put += not is_uniform

    def _drop(self, key: int) -> None:
        gone = self._kept.pop(key, None)
        self.num_put -= gone is not None and not gone.is_uniform


def _in_storage(tensor: Tensor, place: int) -> int:
    """Return where in its storage an element of a tensor is; `place` counts elements row by row."""
    at = int(tensor.storage_offset())
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        place, index = divmod(place, int(size))
        at += index * int(stride)
    return at


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
