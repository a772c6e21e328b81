"""All measurements of one rank, as plain numbers that can be sent to rank 0.

Timings of a rank's matmuls, attention and memory-bound operations, by size.
The time of memory-bound operations, which are the modules of Meshwright's own models, eager, depends on the bytes read
and written, on the number of kernels and, on a CPU, on the functions evaluated: silu costs ten times an addition of as
many bytes. So each operation is timed separately.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.calibrator.collective_seconds import collective_seconds
from meshwright.calibrator.core_share import core_share
from meshwright.calibrator.timing import SizeGrid, Stopwatch, host_seconds
from meshwright.models.contract import next_token_loss
from meshwright.models.rope import rotate
from meshwright.spec.machine.device import CollectiveKind, MemoryOp

_MOST_ROUNDS, _ROUND_S = 3, 5.0
"""Rounds of a calibration, each of which takes some seconds however little time is given."""
_PROBED_SIZE, _MOST_TIMES_FLOAT32 = 512, 8
# Waits between ranks of a CPU are random, with a mean of several times the minimum (all-gather of 256 KiB by 2 ranks on
# 2 cores, 2026-11-21: minimum 0.2 ms, mean 1.1 ms). A step has hundreds of waits, so the mean matters.
_MANY_WAITS_S = 0.1


@dataclass(frozen=True)
class Measurements:
    """Seconds by operation and size; see measure.py, collective_seconds.py and timing.py."""

    matmul_s: dict[tuple[str, int, int, int], float]
    forward_attention_s: dict[tuple[str, int, int], float]
    backward_attention_s: dict[tuple[str, int, int], float]
    forward_memory_op_s: dict[tuple[MemoryOp, str, int], float]
    backward_memory_op_s: dict[tuple[MemoryOp, str, int], float]
    collective_s: dict[tuple[CollectiveKind, int, int], float]
    """Of all ranks and of subgroups; empty with one rank."""
    host_s: dict[str, float]
    """Host seconds per kernel of an eager model, under "kernel"."""
    core_share: dict[str, float] = field(default_factory=dict)
    """What a computing rank got of a core, 0 to 1, under "core"; empty on an accelerator."""


def measure(device_type: str, sizes: SizeGrid, duration_s: float, num_threads: int) -> Measurements:
    """Return this rank's measurements, taken in about `duration_s`; a collective over an existing process group.

    All ranks measure the same sizes at the same time, each with `num_threads` CPU threads, as in training, in several
    rounds. Single-rank measurements keep the minimum, since noise only adds time; collectives keep the median.
    """
    torch.set_num_threads(num_threads)
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    num_rounds = max(1, min(_MOST_ROUNDS, int(duration_s / _ROUND_S)))
    watch = Stopwatch(device, duration_s / sizes.num_points / num_rounds)
    slowdowns = _slowdowns(sizes.dtypes, watch)
    rounds = [_round(sizes, watch, slowdowns) for _ in range(num_rounds)]
    best, usual = _combine(rounds, min), _combine(rounds, statistics.median)
    return replace(best, collective_s=usual.collective_s, core_share=_combine(rounds, statistics.fmean).core_share)


def mean_of(ranks: Sequence[Measurements]) -> Measurements:
    """Return the mean of each measurement over ranks."""
    return _combine(ranks, statistics.fmean)


def slow_dtypes(measured: Measurements) -> list[str]:
    """Return the dtypes whose matmuls take so much longer than float32's that the processor has no kernels for them."""
    took_s = {dtype: sum(s for at, s in measured.matmul_s.items() if at[0] == dtype) for dtype in DTYPES}
    return [dtype for dtype, s in took_s.items() if s > _MOST_TIMES_FLOAT32 * took_s["float32"]]


def _slowdowns(dtypes: Sequence[str], watch: Stopwatch) -> dict[str, int]:
    """Return how many times longer than in float32 matmuls take in each dtype that this processor has no kernels for.

    An AVX2 processor multiplies bfloat16 at 1 GFLOP/s a core: the largest sizes alone would take minutes.
    """
    found = {}
    operands = [torch.randn(_PROBED_SIZE, _PROBED_SIZE, device=watch.device) for _ in range(3)]
    float32_s = watch.seconds(partial(_products, *operands))
    for dtype in set(dtypes) - {"float32"} if watch.device.type == "cpu" else ():
        took_s = watch.seconds(partial(_products, *(each.to(DTYPES[dtype]) for each in operands)))
        if (times := watch.agree(took_s / float32_s)) > _MOST_TIMES_FLOAT32:
            found[dtype] = times
    return found


def _with_slow(took_s: dict[Any, Any], slowdowns: dict[str, int]) -> dict[Any, Any]:
    """Return times by keys that begin with a dtype, and those of slow dtypes as multiples of float32's."""
    of_float32 = {at[1:]: np.array(took) for at, took in took_s.items() if at[0] == "float32"}
    return took_s | {
        (dtype, *at): (times * took).tolist() for dtype, times in slowdowns.items() for at, took in of_float32.items()
    }


def _round(sizes: SizeGrid, watch: Stopwatch, slowdowns: dict[str, int]) -> Measurements:
    own, together, shares = watch, watch, list[float]()
    if watch.device.type == "cpu":
        own = replace(watch, clock=time.thread_time)
        shares = [core_share()]
        together = replace(watch, shortest_sample_s=_MANY_WAITS_S)
    quick = replace(sizes, dtypes=tuple(dtype for dtype in sizes.dtypes if dtype not in slowdowns))
    attention = _with_slow(attention_seconds(quick, own), slowdowns)
    memory_ops = memory_op_seconds(sizes, own)
    has_peers = dist.get_world_size() > 1
    found = Measurements(
        matmul_s=_with_slow(matmul_seconds(quick, own), slowdowns),
        forward_attention_s={at: forward for at, (forward, _) in attention.items()},
        backward_attention_s={at: backward for at, (_, backward) in attention.items()},
        forward_memory_op_s={at: forward for at, (forward, _) in memory_ops.items()},
        backward_memory_op_s={at: back for at, (_, back) in memory_ops.items() if back is not None},
        collective_s=collective_seconds(sizes, together) if has_peers else {},
        host_s={"kernel": host_seconds(own)},
    )
    if not shares:
        return found
    return replace(found, core_share={"core": statistics.fmean([*shares, core_share()])})


def _combine(several: Sequence[Measurements], combine: Callable[[list[float]], float]) -> Measurements:
    return Measurements(
        **{
            kind.name: {
                at: combine([getattr(one, kind.name)[at] for one in several]) for at in getattr(several[0], kind.name)
            }
            for kind in fields(Measurements)
        }
    )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""dtypes by their names in the catalogue."""


def matmul_seconds(sizes: SizeGrid, watch: Stopwatch) -> dict[tuple[str, int, int, int], float]:
    """Return the seconds of the three matmuls of a linear layer, by (dtype, rows, columns, inner).

    Output, input gradient and weight gradient have different memory layouts, so their rates differ.
    """
    took_s = {}
    for dtype, rows, columns, inner in itertools.product(
        sizes.dtypes, sizes.matmul_rows, sizes.matmul_widths, sizes.matmul_widths
    ):
        operands = (
            torch.randn(shape, dtype=DTYPES[dtype], device=watch.device)
            for shape in ((rows, inner), (columns, inner), (rows, columns))
        )
        calls = [partial(_products, *copy) for copy in watch.copies(*operands)]
        took_s[dtype, rows, columns, inner] = watch.seconds(*calls)
    return took_s


def attention_seconds(sizes: SizeGrid, watch: Stopwatch) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Return the seconds of causal attention, forward and backward, by (dtype, seq_len, head_dim)."""
    took_s = {}
    for dtype, seq_len, head_dim in itertools.product(sizes.dtypes, sizes.seq_lens, sizes.head_dims):
        shape = (1, sizes.num_heads, seq_len, head_dim)
        inputs = (torch.randn(shape, dtype=DTYPES[dtype], device=watch.device, requires_grad=True) for _ in range(3))
        attention = partial(F.scaled_dot_product_attention, is_causal=True)
        took_s[dtype, seq_len, head_dim] = both_ways_seconds(watch, attention, *inputs)
    return took_s


def both_ways_seconds(watch: Stopwatch, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
    """Return the seconds of `function(*inputs)` and of its backward."""
    forwards = [partial(function, *copy) for copy in watch.copies(*inputs)]
    backwards = []
    for forward in forwards:
        result, wanted = forward(), [tensor for tensor in forward.args if tensor.requires_grad]
        backwards.append(partial(torch.autograd.grad, result, wanted, torch.ones_like(result), retain_graph=True))
    return watch.seconds(*forwards), watch.seconds(*backwards)


def _products(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return a linear layer's output, input gradient and weight gradient."""
    return torch.mm(x, weight.t()), torch.mm(gradient, weight), torch.mm(gradient.t(), x)


# Last dims of small models; the measured sizes are multiples of them.
_WIDTH, _HEAD_DIM, _VOCAB_SIZE = 256, 64, 1024


def memory_op_seconds(sizes: SizeGrid, watch: Stopwatch) -> dict[tuple[MemoryOp, str, int], tuple[float, float | None]]:
    """Return the seconds forward and backward (None without one) by (operation, dtype, elements)."""
    took_s: dict[tuple[MemoryOp, str, int], tuple[float, float | None]] = {}
    for num_elements in sizes.num_elements:
        for dtype in sizes.dtypes:
            for op, (function, inputs) in _model_ops(num_elements, DTYPES[dtype], watch.device).items():
                took_s[op, dtype, num_elements] = both_ways_seconds(watch, function, *inputs)
        # Parameters, gradients and optimizer state are float32 for any compute dtype.
        for op, call in _parameter_ops(num_elements, watch.device).items():
            took_s[op, "float32", num_elements] = watch.seconds(call), None
    return took_s


def _model_ops(
    num_elements: int, dtype: torch.dtype, device: torch.device
) -> dict[MemoryOp, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Return each operation as a function with inputs of `num_elements`."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    rows = num_elements // _WIDTH
    heads_BSNH = random(1, num_elements // (4 * _HEAD_DIM), 4, _HEAD_DIM)
    angles_SH = torch.randn(heads_BSNH.shape[1], _HEAD_DIM, device=device)
    logits_BSV = random(1, num_elements // _VOCAB_SIZE, _VOCAB_SIZE)
    targets_BS = torch.zeros(logits_BSV.shape[:2], dtype=torch.long, device=device)
    return {
        "add": (lambda x: x + x, [random(rows, _WIDTH)]),
        "swiglu": (lambda gate, up: F.silu(gate) * up, [random(rows, _WIDTH), random(rows, _WIDTH)]),
        "norm": (lambda x, weight: F.rms_norm(x, (_WIDTH,), weight, eps=1e-5), [random(rows, _WIDTH), random(_WIDTH)]),
        "rope": (rotate, [heads_BSNH, angles_SH, angles_SH]),
        "loss": (next_token_loss, [logits_BSV, targets_BS]),
    }


def _parameter_ops(num_elements: int, device: torch.device) -> dict[MemoryOp, Callable[[], object]]:
    # A block has about eight parameters.
    parameters = [nn.Parameter(torch.randn(num_elements // 8, device=device)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    return {"update": optimizer.step, "clip": partial(nn.utils.clip_grad_norm_, parameters, 1.0)}
