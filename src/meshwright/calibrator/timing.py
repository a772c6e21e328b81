"""Timing of calls that all ranks make at the same time, a tiny step among them; grids of sizes to time.

Ranks of one machine share memory bandwidth, caches and power, so a rank alone is faster than in training. All ranks
start each measurement together and make as many calls as the slowest rank has time for.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.models.llama import LlamaBlock
from meshwright.models.rope import rope_tables
from meshwright.parallelism.torch_private.torch_dispatch import count_kernels
from meshwright.spec.machine.device import CollectiveKind, MemoryOp
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.units import KiB, MiB

_MOST_SAMPLES, _MOST_CALLS = 200, 1000
_CLOCK_TICK_S = 1e-9
# More than the caches of one core; shared caches may still hit, as in training.
_COLD_BYTES, _MOST_COPIES = 16 * MiB, 16


@dataclass(frozen=True)
class Stopwatch:
    """Timer of calls on `device`, with about `budget_s` per measurement."""

    device: torch.device
    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    """Clock in seconds. Thread time excludes other programs, for kernels on the CPU; only wall time includes waits for
    other ranks."""
    shortest_sample_s: float = 2e-3
    """Minimum duration of a sample, the mean of equal calls, so that clock and synchronization overheads are
    negligible."""

    def seconds(self, *calls: Callable[[], object]) -> float:
        """Return the seconds of a call on this rank; a collective: all ranks time the same call.

        `calls` do equal work on separate memory, in turn, and their results are kept for a while, so that inputs and
        outputs are not in the caches, as in a model.
        """
        cycle = _CallCycle(calls)
        first_s = self._sample(cycle, 1)
        # Once each, if there is time: what is touched first is slower.
        for _ in range(min(self.agree(self.budget_s / first_s), len(calls) - 1)):
            first_s = self._sample(cycle, 1)
        num_calls = min(self.agree(self.shortest_sample_s / first_s), _MOST_CALLS)
        num_samples = min(self.agree(self.budget_s / (num_calls * first_s)), _MOST_SAMPLES)
        dist.barrier()
        return statistics.median(self._sample(cycle, num_calls) for _ in range(num_samples))

    def copies(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield `tensors` and copies of them that together exceed a core's caches."""
        yield tensors
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        for _ in range(min(_COLD_BYTES // num_bytes, _MOST_COPIES)):
            yield tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)

    def _sample(self, cycle: _CallCycle, num_calls: int) -> float:
        self._wait()
        started_s = self.clock()
        for _ in range(num_calls):
            cycle.call()
        self._wait()
        return max(self.clock() - started_s, _CLOCK_TICK_S) / num_calls

    def agree(self, wanted: float) -> int:
        """Return the smallest count of all ranks, at least 1; a collective."""
        count = torch.tensor(max(1, round(wanted)), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        return int(count)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _CallCycle:
    """Cycle of calls that keeps the latest result of each."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._next = itertools.cycle(calls)
        self._kept: deque[object] = deque(maxlen=len(calls))

    def call(self) -> None:
        self._kept.append(next(self._next)())


_NUM_BLOCKS = 4
# So few and so narrow that steps are CPU-bound.
_FEW_TOKENS, _SMALLEST_WIDTH = 4, 32


def host_seconds(watch: Stopwatch) -> float:
    """Return host seconds per kernel of an eager model, forward and backward, with modules and autograd.

    Measured on blocks so narrow that they are CPU-bound; views are not kernels.
    """
    step, counted = (_Step(_SMALLEST_WIDTH, _FEW_TOKENS, device) for device in (watch.device, torch.device("cpu")))
    return watch.seconds(step) / count_kernels(counted)


class _Step:
    """Callable: forward and backward of a few blocks of Llama on `num_tokens` tokens."""

    def __init__(self, width: int, num_tokens: int, device: torch.device) -> None:
        architecture = LlamaArchitecture(
            vocab_size=32,
            dim=width,
            num_layers=_NUM_BLOCKS,
            num_heads=4,
            num_kv_heads=2,
            head_dim=width // 4,
            ffn_dim=4 * width,
            max_seq_len=num_tokens,
        )
        self.blocks = _Blocks(architecture).to(device)
        self._turns = rope_tables(architecture, torch.arange(num_tokens, device=device))
        self._x_BSD = torch.randn(1, num_tokens, width, device=device)

    def __call__(self) -> None:
        self.blocks(self._x_BSD, *self._turns).sum().backward()


class _Blocks(nn.Module):
    """Sequence of Llama blocks."""

    def __init__(self, architecture: LlamaArchitecture) -> None:
        super().__init__()
        self.each = nn.ModuleList(LlamaBlock(architecture) for _ in range(architecture.num_layers))

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        """Return x_BSD after all blocks."""
        for block in self.each:
            x_BSD = block(x_BSD, cos_SH, sin_SH)
        return x_BSD


@dataclass(frozen=True)
class SizeGrid:
    """Sizes to measure; an operation is measured at every combination of its sizes."""

    dtypes: tuple[str, ...]
    """dtypes of matmuls, attention and memory-bound operations."""
    matmul_rows: tuple[int, ...]
    """Tokens of a linear layer."""
    matmul_widths: tuple[int, ...]
    """Inputs, and outputs, of a linear layer."""
    seq_lens: tuple[int, ...]
    """Sequence lengths of attention."""
    head_dims: tuple[int, ...]
    """Widths of a head."""
    num_heads: int
    """Heads of attention, times sequences."""
    num_elements: tuple[int, ...]
    """Elements of memory-bound operations."""
    collective_bytes: tuple[int, ...]
    """Bytes of the whole tensor of collectives."""

    @property
    def num_points(self) -> int:
        """Return the approximate number of measurements, which share the time equally."""
        matmuls = len(self.matmul_rows) * len(self.matmul_widths) ** 2
        attentions = 2 * len(self.seq_lens) * len(self.head_dims)
        memory_ops = 2 * len(get_args(MemoryOp)) * len(self.num_elements)
        collectives = len(get_args(CollectiveKind)) * len(self.collective_bytes)
        return len(self.dtypes) * (matmuls + attentions + memory_ops) + collectives


CPU_SIZES = SizeGrid(
    dtypes=("float32", "bfloat16"),
    matmul_rows=(64, 512),
    matmul_widths=(128, 512, 2048),
    seq_lens=(128, 256, 512, 1024),
    head_dims=(32, 64, 128),
    num_heads=4,
    num_elements=(16 * KiB, 128 * KiB, 512 * KiB, 2 * MiB),
    collective_bytes=(4 * KiB, 64 * KiB, 1 * MiB, 16 * MiB),
)
"""For a rank on one or a few CPU cores: small models, caches of KiB and MiB."""

CUDA_SIZES = SizeGrid(
    dtypes=("float32", "bfloat16"),
    matmul_rows=(256, 1024, 4096, 16384),
    matmul_widths=(256, 1024, 4096, 16384),
    seq_lens=(512, 2048, 8192),
    head_dims=(64, 128),
    num_heads=64,
    num_elements=(64 * KiB, 1 * MiB, 16 * MiB, 64 * MiB),
    collective_bytes=(64 * KiB, 1 * MiB, 16 * MiB, 256 * MiB),
)
"""For an accelerator."""
