"""Time and memory of head and next-token loss, with all logits at once and in chunks of tokens: run as a module."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist

from benchmarks.resident import Peak
from meshwright.models.contract import next_token_loss
from meshwright.parallelism.head import SeparateHead
from meshwright.parallelism.losses.chunked_loss import Chunking, chunked_loss, cross_entropy_
from meshwright.units import format_bytes

SHAPES = ("4096x32768x512:float32", "4096x131072x128:float32", "2048x32768x64:bfloat16")
"""Tokens x vocabulary x width : format. Kernels for bfloat16 are slow on processors without instructions for it."""
CHUNKS = (1, 8, 16, 32)


class Case(NamedTuple):
    """Inputs of one measurement."""

    hidden_TD: Tensor
    head: torch.nn.Linear
    target_T: Tensor


class Measured(NamedTuple):
    """What one way of computing the loss took."""

    loss: float
    gradients: list[Tensor]
    seconds: float
    """CPU time of the one thread that computes, which other programs on the machine change little."""
    peak_bytes: int
    """Above what there was before, the gradients of hidden states and head left out."""


def main() -> None:
    """Print one row for each shape and way."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--shapes", nargs="+", default=SHAPES, help="TOKENSxVOCABULARYxWIDTH:FORMAT")
    options.add_argument("--chunks", nargs="+", type=int, default=CHUNKS, help="1: all logits at once")
    options.add_argument("--rounds", type=int, default=3)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| shape | chunks | CPU seconds | of all at once | peak | of the logits | gradients differ by |")
    print("|---|---|---|---|---|---|---|")
    for shape in chosen.shapes:
        _measure_shape(shape, chosen.chunks, chosen.rounds)
    dist.destroy_process_group()


def _measure_shape(shape: str, chunks: list[int], rounds: int) -> None:
    case, logits_bytes = _case(shape)
    # A round runs each way once, so that all ways see the same machine.
    rows = {number: [] for number in dict.fromkeys((1, *chunks))}  # type: dict[int, list[Measured]]
    for _ in range(rounds):
        for number, found in rows.items():
            found.append(_measure(case, number))
    whole = rows[1]
    for number, found in rows.items():
        ratio = statistics.median(own.seconds / other.seconds for own, other in zip(found, whole, strict=True))
        seconds = statistics.median(one.seconds for one in found)
        peak = max(one.peak_bytes for one in found)
        print(
            f"| {shape} | {number} | {seconds:.2f} | {ratio:.2f} | {format_bytes(peak)} | {peak / logits_bytes:.2f} "
            f"| {_difference(found[0], whole[0]):.0e} |",
            flush=True,
        )


def _case(shape: str) -> tuple[Case, int]:
    sizes, dtype_name = shape.split(":")
    num_tokens, vocabulary, width = map(int, sizes.split("x"))
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype)
    hidden_TD = torch.randn(num_tokens, width).to(dtype).requires_grad_()
    case = Case(hidden_TD, head, torch.randint(0, vocabulary, (num_tokens,)))
    return case, num_tokens * vocabulary * dtype.itemsize


def _measure(case: Case, num_chunks: int) -> Measured:
    """Return one forward and backward, which must differ by rounding alone between ways."""
    case.hidden_TD.grad = case.head.weight.grad = None
    # Memory that glibc keeps of an earlier measurement would hide some of this one's.
    ctypes.CDLL(None).malloc_trim(0)
    compute = _all_at_once if num_chunks == 1 else _in_chunks(num_chunks)
    peak, start_s = Peak(), time.process_time()
    loss = compute(case)
    loss.backward()
    seconds = time.process_time() - start_s
    gradients = [one.grad for one in (case.hidden_TD, case.head.weight) if one.grad is not None]
    above = peak.above_start() - sum(one.nbytes for one in gradients)
    return Measured(loss.item(), gradients, seconds, above)


def _all_at_once(case: Case) -> Tensor:
    return next_token_loss(F.linear(case.hidden_TD, case.head.weight), case.target_T)


def _in_chunks(num_chunks: int) -> Callable[[Case], Tensor]:
    group = dist.group.WORLD
    assert group is not None
    chunking = Chunking(num_chunks, group, splits_backward=False, cross_entropy=cross_entropy_)
    return lambda case: chunked_loss(case.hidden_TD, SeparateHead(case.head, lambda x: x), case.target_T, chunking)


def _difference(one: Measured, other: Measured) -> float:
    return max(
        float((own.double() - their.double()).norm() / their.double().norm())
        for own, their in zip(one.gradients, other.gradients, strict=True)
    )


if __name__ == "__main__":
    main()
