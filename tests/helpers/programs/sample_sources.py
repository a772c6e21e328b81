"""Data of tests' own, as data.source names it: numbered samples, and streams with and without a state."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

Pair = tuple[Any, Any]


def tokens_of(number: int, seq_len: int = 32) -> Pair:
    """Return (inputs, targets) of sample `number`, whose first token is the number."""
    tokens = np.random.default_rng(number).integers(0, 250, seq_len + 1)
    tokens[0] = number % 250
    return tokens[:-1], tokens[1:]


class Numbered:
    """Numbered samples, one of which fails if asked to."""

    def __init__(
        self, length: int = 60, bad: int = -1, killed_at: int = -1, hangs_at: int = -1, exits_at: int = -1
    ) -> None:
        self._length, self._bad, self._killed_at, self._hangs_at = length, bad, killed_at, hangs_at
        self._exits_at = exits_at
        self._built_in = os.getpid()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Pair:
        if index == self._bad:
            raise ValueError(f"record {index} is bad")
        if index == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self._hangs_at:
            time.sleep(600)
        if index == self._exits_at:
            raise SystemExit(0)
        return tokens_of(index)


class Validated:
    """A stream with samples for validation."""

    validation = Numbered(12)

    def __iter__(self) -> Iterator[Pair]:
        return map(tokens_of, range(100))


class Counting:
    """A stream with a state; each epoch has other samples."""

    def __init__(self, length: int = 30) -> None:
        self.length, self.place, self.epoch = length, 0, 0

    def __iter__(self) -> Iterator[Pair]:
        while self.place < self.length:
            self.place += 1
            yield tokens_of(self.epoch * self.length + self.place - 1)
        self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.epoch = state["place"], state["epoch"]


class Iterable:
    """A stream without a state that can be begun again."""

    def __init__(self, length: int = 30) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Pair]:
        return map(tokens_of, range(self.length))


class Uncounted(Numbered):
    def __len__(self) -> Any:
        return "many"


def generated(length: int = 30, bad: int = -1, exits_at: int = -1) -> Iterator[Pair]:
    for number in range(length):
        if number == exits_at:
            raise SystemExit(0)
        if number == bad:
            raise ValueError(f"record {number} is bad")
        yield tokens_of(number)


def restless(length: int = 30) -> Iterator[Pair]:
    for _ in range(length):
        yield tokens_of(int.from_bytes(os.urandom(4)))


class Once:
    """Gives its samples a single time, to its first reader."""

    _left = iter(range(10))

    def __iter__(self) -> Iterator[Pair]:
        return map(tokens_of, self._left)


class HalfStateful(Iterable):
    def state_dict(self) -> dict[str, int]:
        return {}


class UnsavableState(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"nested": [{"file": object()}]}
