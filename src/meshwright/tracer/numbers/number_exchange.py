"""What ranks that are traced one by one exchange: known numbers in collectives and messages, and Python objects.

Each rank is traced in a process of its own without waiting for others. In the first pass a rank assumes that the others
contribute the same as itself. If they contribute something else, such as their own number of rows, the rank is traced
again with their numbers, until all assumptions hold (rank_process.py). Contributions of ranks that were not traced, or
whose numbers are unknown, remain assumptions and are reported as guesses.

Python objects that traced ranks send to each other, such as the shapes between pipeline stages.
Each rank is traced in a process of its own; all share a folder, with one file per object. A rank that waits for an
object records the sender, which is then traced too; waiting ranks do not count as running.
"""

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.spec.trace.trace import RecordKind
from meshwright.tracer.record.collective_ops import CollectiveCall

Number = float | int | bool
_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda one, other: one + other,
    "avg": lambda one, other: one + other,
    "product": lambda one, other: one * other,
    "min": min,
    "max": max,
    "band": lambda one, other: one & other,
    "bor": lambda one, other: one | other,
    "bxor": lambda one, other: one ^ other,
}
_REDUCED = ("allreduce_", "all_reduce", "all_reduce_", "reduce_")
_REDUCE_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor")
_GATHERS = ("allgather_", "_allgather_base_", "all_gather_into_tensor", "gather_")
_ALL_TO_ALLS = ("alltoall_", "alltoall_base_", "all_to_all_single")
_FROM_ROOT = ("broadcast_", "broadcast", "scatter_")


class Numbers(NamedTuple):
    """Numbers of one or more tensors, one after the other."""

    values: tuple[Number, ...]
    is_guess: bool
    is_uniform: bool = False
    """Whether they are all the same, and not written individually."""


class Call(NamedTuple):
    """A collective or message, matched between ranks by its order."""

    group: tuple[tuple[int, ...], str]
    communicator: str
    op: str
    agreed: str
    ends: tuple[int, ...] = ()
    """Sender and receiver of a message."""


_Key = tuple[Call, int]


class _Done(NamedTuple):
    """Contributions and inputs of one traced rank."""

    contributed: dict[_Key, Numbers]
    sources: dict[_Key, tuple[int, ...]]
    """The ranks whose numbers it used."""


class NumberExchange:
    """The contributions of this rank, and the known ones of others."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether ranks are traced together, so that they can exchange numbers."""
        self.is_settled = True
        """False in the last pass, in which some assumptions may not hold."""
        self._known: dict[int, dict[_Key, Numbers]] = {}
        self._own = _Done({}, {})
        self._counts = Counter[Call]()

    def result_of(self, found: CollectiveCall, op: str, rank: int, contributed: Numbers | None) -> Numbers | None:
        """Return the numbers that a collective or message writes; None if unknown, or if it writes nothing.

        `op` is its name, `contributed` the contribution of this rank, None if unknown.
        """
        if found.group is None:
            return None
        call = _call(found, op, rank)
        key = (call, self._counts[call])
        self._counts[call] += 1
        if contributed is not None:
            self._own.contributed[key] = contributed
        sources = _sources(call, found, rank)
        if contributed is None and (not sources or rank in sources):
            return None
        self._own.sources[key] = sources
        given = [contributed if one == rank else self._of(one, key, contributed) for one in sources]
        numbers = [one for one in given if one is not None]
        if not numbers or len(numbers) < len(given):
            return None
        values = _combined(call, [one.values for one in numbers], found, rank)
        if values is None:
            return None
        is_uniform = all(one.is_uniform for one in numbers) and len(set(values)) == 1
        is_guess = any(one.is_guess or (one.values != numbers[0].values and not self.is_settled) for one in numbers)
        return Numbers(values, is_guess, is_uniform)

    def _of(self, rank: int, key: _Key, own: Numbers | None) -> Numbers | None:
        """Return the contribution of another rank; if unknown, that of this one."""
        if rank in self._known and key in self._known[rank]:
            return self._known[rank][key]
        if own is None:
            return None
        differs = any(key in one and one[key].values != own.values for one in self._known.values())
        return own._replace(is_guess=own.is_guess or rank in self._known or differs)

    def save(self, folder: Path, rank: int) -> None:
        """Write the contributions and inputs of this rank to a folder, for `learn`."""
        if self.is_on:
            (folder / f"{rank}.numbers").write_bytes(pickle.dumps(self._own))

    def learn(self, folder: Path) -> set[int]:
        """Load the contributions of all ranks, and return the ranks that assumed other ones."""
        done: dict[int, _Done] = {int(one.stem): pickle.loads(one.read_bytes()) for one in folder.glob("*.numbers")}
        unlike = {rank for rank, one in done.items() if self._is_unlike(one, done)}
        self._known = {rank: one.contributed for rank, one in done.items()}
        return unlike

    def _is_unlike(self, one: _Done, done: Mapping[int, _Done]) -> bool:
        """Return whether a rank assumed other numbers than a traced rank contributed."""
        for key, sources in one.sources.items():
            own = one.contributed.get(key)
            for source in sources:
                before = self._known[source].get(key, own) if source in self._known else own
                if source in done and done[source].contributed.get(key, own) != before:
                    return True
        return False


def used_numbers(folder: Path, rank: int) -> bool:
    """Return whether a rank used numbers of others before it ended."""
    file = folder / f"{rank}.numbers"
    return file.exists() and bool(pickle.loads(file.read_bytes()).sources)


def _call(found: CollectiveCall, op: str, rank: int) -> Call:
    assert found.group is not None
    if found.kind == RecordKind.COLLECTIVE:
        return Call(found.group, found.communicator, op, found.agreed)
    ends = (rank, found.peer) if found.kind == RecordKind.SEND else (found.peer, rank)
    return Call(found.group, found.communicator, "message", "", ends)


def _sources(call: Call, found: CollectiveCall, rank: int) -> tuple[int, ...]:
    """Return the ranks whose numbers a rank receives, in the order of the group."""
    if call.ends:
        return () if rank == call.ends[0] else (call.ends[0],)
    if call.op in _FROM_ROOT:
        return () if found.root is None else (call.group[0][found.root],)
    return call.group[0] if found.written or found.is_functional else ()


def _combined(
    call: Call, given: Sequence[Sequence[Number]], found: CollectiveCall, rank: int
) -> tuple[Number, ...] | None:
    """Return the result of a collective of these contributions; None if unknown."""
    place, count = call.group[0].index(rank), len(call.group[0])
    if call.ends or call.op in ("broadcast_", "broadcast"):
        return tuple(given[0])
    if call.op == "scatter_":
        return _part(given[0], place, count)
    if call.op in _GATHERS:
        return tuple(chain(*given))
    if len({len(one) for one in given}) > 1 or found.sends:
        return None
    if call.op in _ALL_TO_ALLS:
        parts = [_part(one, place, count) for one in given]
        return None if None in parts else tuple(chain.from_iterable(one for one in parts if one is not None))
    if call.op not in (*_REDUCED, *_REDUCE_SCATTERS):
        return None
    name = call.agreed.partition(",")[0]
    if name not in _REDUCTIONS:
        return None
    whole = [_reduced(name, numbers) for numbers in zip(*given, strict=True)]
    return tuple(whole) if call.op in _REDUCED else _part(whole, place, count)


def _reduced(name: str, numbers: Iterable[Number]) -> Number:
    numbers = list(numbers)
    found: Number = reduce(_REDUCTIONS[name], numbers)
    return found / len(numbers) if name == "avg" else found


def _part(numbers: Sequence[Number], place: int, count: int) -> tuple[Number, ...] | None:
    """Return one of `count` equal parts; None where they are not equal."""
    size, rest = divmod(len(numbers), count)
    return None if rest else tuple(numbers[place * size : (place + 1) * size])


_POLL_S = 0.02
_TIMEOUT_S = 600.0


class ObjectExchange:
    """One rank's access to the folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._num_sent, self._num_received = Counter[int](), Counter[int]()

    def send(self, objects: Sequence[Any], peer: int) -> None:
        """Send objects to a rank, which receives them in order."""
        file = self.folder / f"{self.rank}-{peer}-{self._num_sent[peer]}.pickle"
        self._num_sent[peer] += 1
        # Atomic: the file is complete when it gets its name.
        unfinished = file.with_suffix(".part")
        with unfinished.open("wb") as opened:
            _Pickler(opened).dump(list(objects))
        unfinished.rename(file)

    def receive(self, peer: int) -> list[Any]:
        """Return the next objects from a rank; TimeoutError if it sends none."""
        file = self.folder / f"{peer}-{self.rank}-{self._num_received[peer]}.pickle"
        self._num_received[peer] += 1
        waiting, end = self.folder / f"{self.rank}.waits", time.monotonic() + _TIMEOUT_S
        waiting.write_text(str(peer), encoding="utf-8")
        while not file.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"rank {peer} sent no object to rank {self.rank} within {_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        waiting.unlink()
        objects: list[Any] = pickle.loads(file.read_bytes())
        return objects


class _Pickler(pickle.Pickler):
    """Pickles fake tensors as their metadata: up to torch 2.12 pipeline stages send meta tensors."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a fake tensor; NotImplemented for other values."""
        if not isinstance(value, FakeTensor):
            return NotImplemented
        kind = (tuple(value.shape), value.stride(), value.dtype, str(value.device), value.requires_grad)
        return _empty, kind


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, grad: bool) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=grad)


def waiting_ranks(folder: Path) -> dict[int, int]:
    """Return by waiting rank the sender that it waits for."""
    found = {}
    for file in folder.glob("*.waits"):
        try:
            found[int(file.stem)] = int(file.read_text(encoding="utf-8") or file.stem)
        except FileNotFoundError:
            # It has received its object.
            continue
    return found
