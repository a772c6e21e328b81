"""One hash over all parameters, whatever their sharding; no tensor is gathered.

Each rank hashes the elements of its shards where they are:

    z(i) = mix(bits of element i  xor  i * c)                i: index in the whole tensor; mix: SplitMix64's finalizer
    sums of a tensor = (sum of z(i), sum of z(i)^2)          modulo 2^64, over all ranks

A sum does not depend on who adds which part, and a moved or changed element changes both. It finds accidents, not
forgeries. Mixing constants: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from meshwright.checkpoint.format.boxes import Box
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saving import bytes_of
from meshwright.checkpoint.shards import Shard, judge_of, owned_shards, shard_of

_BLOCK_ELEMENTS = 1 << 16
"""Elements mixed at once: intermediate values stay in the cache."""
_INCREMENT, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class _Sums(NamedTuple):
    """Both sums over a part of one tensor, modulo 2^64."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    second: int


def parameter_hash(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of name, shape, dtype and elements of the parameters of all ranks; a collective.

    Rank 0 returns the hash, other ranks "". Each element is counted once, however many ranks hold it.
    """
    peers = GroupPeers()
    owned = owned_shards([shard_of(name, tensor) for name, tensor in dict(named).items()], peers)
    by_judge: list[list[_Sums]] = [[] for _ in range(peers.num_ranks)]
    for shard in owned:
        by_judge[judge_of(shard.name, peers.num_ranks)].append(_sums(shard))
    received = peers.exchange(by_judge)
    of_judge = _total(_Sums(*sums) for of_rank in received for sums in of_rank)
    collected = peers.collect(of_judge)
    digest = xxhash.xxh3_128()
    for sums in sorted(sums for of_rank in collected for sums in of_rank):
        digest.update(repr(tuple(sums)).encode())
    return digest.hexdigest() if peers.rank == 0 else ""


def _sums(shard: Shard) -> _Sums:
    """Return the sums over this rank's part of a tensor."""
    first = second = 0
    for bits, index in _blocks(shard):
        z = bits ^ (index * _INCREMENT)
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            z ^= z >> np.uint64(shift)
            z *= factor
        z ^= z >> np.uint64(31)
        first += int(z.sum())
        second += int((z * z).sum())
    return _Sums(shard.name, shard.dtype, shard.shape, first % 2**64, second % 2**64)


def _blocks(shard: Shard) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Yield bits and index in the whole tensor of this part's elements, a few runs of consecutive ones at a time."""
    if shard.data.numel() == 0:
        return
    starts, length = _runs(shard.box, shard.shape)
    bits = np.frombuffer(bytes_of(shard.data), dtype=f"u{shard.data.element_size()}").reshape(len(starts), length)
    runs_at_once, steps = max(1, _BLOCK_ELEMENTS // length), np.arange(length, dtype=np.uint64)
    for run in range(0, len(starts), runs_at_once):
        for step in range(0, length, _BLOCK_ELEMENTS):
            block = np.s_[run : run + runs_at_once], np.s_[step : step + _BLOCK_ELEMENTS]
            yield bits[block].astype(np.uint64), starts[block[0], None] + steps[None, block[1]]


def _runs(box: Box, shape: tuple[int, ...]) -> tuple[NDArray[np.uint64], int]:
    """Return the first index in a tensor of `shape` of each run of consecutive elements in `box`, and their length."""
    starts, length, stride, is_run = np.zeros(1, dtype=np.uint64), 1, 1, True
    for offset, size, whole in zip(reversed(box.offsets), reversed(box.shape), reversed(shape), strict=True):
        if is_run:
            length, starts = length * size, starts + np.uint64(offset * stride)
            is_run = size == whole
        else:
            outer = (offset + np.arange(size, dtype=np.uint64)) * np.uint64(stride)
            starts = (outer[:, None] + starts[None]).reshape(-1)
        stride *= whole
    return starts, length


def _total(parts: Iterable[_Sums]) -> list[_Sums]:
    """Return the sums of whole tensors from those of their parts."""
    totals: dict[str, _Sums] = {}
    for name, dtype, shape, first, second in parts:
        before = totals.get(name, _Sums(name, dtype, tuple(shape), 0, 0))
        totals[name] = before._replace(first=(before.first + first) % 2**64, second=(before.second + second) % 2**64)
    return list(totals.values())
