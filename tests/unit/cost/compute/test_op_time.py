"""What kernels of a trace take: as the planner's blocks where both know, never 0 where one runs, never guessed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrated_device import calibrated
from cost_configs import MODELS, changed, configs, training_setup
from meshwright.cost.achieved_rates import peaks_of, rates_of
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import work_of
from meshwright.cost.compute.block_time import BlockPricer
from meshwright.cost.compute.op_table import moved_bytes
from meshwright.cost.compute.op_time import op_seconds
from meshwright.cost.compute.own_kernels import own_kernels
from meshwright.cost.constants import fitted_constants
from meshwright.cost.stack_factors import stacks_of
from meshwright.errors import UnsupportedError
from meshwright.hardware.catalogue import load_cluster
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.device import Figure, OpLine, Source
from meshwright.spec.trace.trace import Signature, TensorShape

H100 = load_cluster("h100-ib400").device
_SOURCE = Source(title="a test", date="2026-11-22", kind="measured")
CUDNN = "aten._scaled_dot_product_cudnn_attention"


def signature(op: str, inputs: list[tuple[int, ...]], *outputs: tuple[int, ...], dtype: str = "bfloat16") -> Signature:
    sizes = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
    read, written = (int(sum(np.prod(dims) for dims in tensors)) for tensors in (inputs, outputs))
    return Signature(
        op=op,
        inputs=tuple(TensorShape(dtype=dtype, dims=dims) for dims in inputs),
        outputs=tuple(TensorShape(dtype=dtype, dims=dims) for dims in outputs),
        read_bytes=read * sizes.get(dtype, 8),
        written_bytes=written * sizes.get(dtype, 8),
    )


def matmul(m: int, n: int, k: int) -> Signature:
    return signature("aten.mm.default", [(m, k), (k, n)], (m, n))


def attention(heads: int, seq_len: int, width: int, *, is_backward: bool) -> Signature:
    shape = (1, heads, seq_len, width)
    inputs, op = [shape] * (4 if is_backward else 3), f"{CUDNN}{'_backward' if is_backward else ''}.default"
    return signature(op, inputs, shape).replace(is_causal=True)


@pytest.mark.parametrize("cluster", ["h100-ib400", "dgx-a100", "dgx-b200"])
@pytest.mark.parametrize("tp", [1, 4])
def test_matmuls_and_attention_take_what_the_planner_says(cluster: str, tp: int) -> None:
    of = training_setup("llama3-8b", cluster, "meshwright", seq_len=4096)
    in_configs = configs(of, Layout(tp=tp))
    work, peaks, constants = work_of(in_configs), peaks_of((of,)), fitted_constants()
    times = BlockPricer(work, (of,), peaks).price(rates_of((of,), peaks, constants), constants)
    slow = float(stacks_of(in_configs).factors(constants).compute[0])
    block = int(np.flatnonzero(work.blocks.kind == BLOCK)[0])
    lines = [[int(getattr(work.matmuls, side)[at]) for side in "mnk"] for at in _lines_of(work.matmuls.block, block)]
    device = of.cluster.device
    forward = op_seconds([matmul(m, n, k) for m, n, k in lines], device).sum()
    back = op_seconds([one for m, n, k in lines for one in (matmul(m, k, n), matmul(n, k, m))], device).sum()
    assert (forward, back) == pytest.approx([slow * times.matmul[way][block] for way in (0, 1)])
    heads, width = 32 // tp, int(work.blocks.head_width[block])
    both = op_seconds([attention(heads, 4096, width, is_backward=way) for way in (False, True)], device)
    assert both == pytest.approx([slow * times.attention[way][block] for way in (0, 1)])


@pytest.mark.parametrize("cluster", ["h100-ib400", "dgx-a100"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_calibrated_accelerator_has_one_price_in_formulas_and_simulation(cluster: str, compiled: bool) -> None:
    known = load_cluster(cluster)
    own = known.replace(device=calibrated(known.device))
    of = training_setup("llama3-8b", own, "meshwright", seq_len=4096)
    of = of if compiled else changed(of, kernels="eager")
    in_configs = configs(of, Layout(tp=2))
    work, constants = work_of(in_configs), fitted_constants()
    times, plain = (
        BlockPricer(work, (one,), peaks_of((one,))).price(rates_of((one,), peaks_of((one,)), constants), constants)
        for one in (of, replace(of, cluster=known))
    )
    factors = stacks_of(in_configs).factors(constants)
    assert (float(factors.compute[0]), float(factors.overhead[0])) == (1.0, 1.0)
    block = int(np.flatnonzero(work.blocks.kind == BLOCK)[0])
    lines = [[int(getattr(work.matmuls, side)[at]) for side in "mnk"] for at in _lines_of(work.matmuls.block, block)]
    forward = op_seconds([matmul(m, n, k) for m, n, k in lines], own.device).sum()
    back = op_seconds([one for m, n, k in lines for one in (matmul(m, k, n), matmul(k, n, m))], own.device).sum()
    assert (forward, back) == pytest.approx([times.matmul[way][block] for way in (0, 1)])
    both = op_seconds([attention(16, 4096, 128, is_backward=way) for way in (False, True)], own.device)
    assert both == pytest.approx([times.attention[way][block] for way in (0, 1)], rel=0.001)
    assert times.attention[0][block] != pytest.approx(plain.attention[0][block], rel=0.01)
    # Kernels between matmuls are those of formulas, at the bandwidth that was measured: fused ones are fewer.
    started = constants["kernel_s"] * (own_kernels(work, (of,))[0][block])
    moved, moved_plain = times.memory[0][block] - started, plain.memory[0][block] - started
    assert moved == pytest.approx(moved_plain * constants["memory_rate"] / 0.7)


def test_grouped_matmuls_of_a_calibrated_accelerator_are_tiles_at_its_best_rate() -> None:
    own = calibrated(H100, share=0.8)
    shapes = [(128 * 64, 2048), (128, 2048, 768)], (128 * 64, 768)
    grouped = signature("aten._grouped_mm.default", *shapes)
    plain, measured = (float(op_seconds([grouped], device)[0]) for device in (H100, own))
    constants = fitted_constants()
    # Not at the rate that one product of so few rows was measured at, a tenth of the best.
    best = constants["matmul.hopper"] / 0.8
    assert measured < 1.2 * plain / constants["plain_compute"] * max(best, constants["memory_rate"] / 0.7)


def _lines_of(row: np.ndarray, block: int) -> list[int]:
    return np.flatnonzero(row == block).tolist()


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
def test_no_matmul_is_faster_than_the_peak_or_the_memory(m: int, n: int, k: int) -> None:
    (seconds,) = op_seconds([matmul(m, n, k)], H100)
    peak, memory = H100.peak_flops_per_s("bfloat16"), H100.memory_bytes_per_s
    assert peak is not None
    assert memory is not None
    assert seconds > 2 * m * n * k / peak
    assert seconds > 2 * (m * k + k * n + m * n) / memory.value


@given(st.integers(1, 64), st.integers(1, 8), st.integers(8, 512))
def test_groups_are_not_faster_than_one_matmul_of_all_their_rows(groups: int, tiles: int, width: int) -> None:
    # Rows that fill their tiles: of others a group, whose rows are a mean, is charged half a tile and no whole one.
    rows = 256 * tiles
    grouped = signature(
        "aten._grouped_mm.default", [(groups * rows, width), (groups, width, width)], (groups * rows, width)
    )
    several, one = op_seconds([grouped, matmul(groups * rows, width, width)], H100)
    assert several >= one


@pytest.mark.parametrize("model", MODELS[:1])
def test_what_a_mask_leaves_out_is_not_computed(model: str) -> None:
    causal = attention(8, 4096, 128, is_backward=False)
    half, whole = op_seconds([causal, causal.replace(is_causal=False)], H100)
    # The longer context is the faster one.
    assert 1.8 < whole / half < 2


def test_the_rest_takes_its_bytes_and_a_start() -> None:
    small, large = (signature("aten.add.Tensor", [(size,)] * 2, (size,)) for size in (1, 2**28))
    start_s, seconds = op_seconds([small, large], H100)
    assert start_s > 1e-6
    assert H100.memory_bytes_per_s is not None
    assert 1.1 < seconds / (3 * 2 * 2**28 / H100.memory_bytes_per_s.value) < 2


@pytest.mark.parametrize("op", ["aten.empty.memory_format", "aten._unsafe_view.default", "c10d.allreduce_.default"])
def test_what_is_no_kernel_takes_nothing(op: str) -> None:
    assert op_seconds([signature(op, [(1024,)], (1024,))], H100).tolist() == [0.0]


def test_a_shard_that_is_copied_into_a_buffer_of_all_ranks_takes_as_long_as_it_is() -> None:
    few, many = (
        signature("fsdp.all_gather_copy_in.default", [(2**24,)], (2**24,), (ranks * 2**24,)) for ranks in (2, 1024)
    )
    assert op_seconds([few], H100) == pytest.approx(op_seconds([many], H100))


@pytest.mark.parametrize(
    ("op", "inputs", "equal_bytes"),
    [
        # Fills read nothing; rows written over others are read once, and written once.
        ("aten.new_zeros.default", [(4096, 4096)], 2 * 4096 * 4096),
        ("aten.index_copy_.default", [(4096, 4096), (64,), (64, 4096)], 2 * 2 * 64 * 4096),
        # One number a row is read, read at its place and written there.
        ("aten.scatter_add_.default", [(4096, 4096), (4096, 1), (4096, 1)], 3 * 2 * 4096),
        ("aten.nll_loss_backward.default", [(4096, 4096), (4096, 4096), (4096,)], 2 * 4096 * 4096),
    ],
)
def test_only_what_is_written_moves(op: str, inputs: list[tuple[int, ...]], equal_bytes: int) -> None:
    assert moved_bytes(signature(op, inputs, inputs[0])) == equal_bytes


def test_a_few_rows_of_a_large_table_do_not_take_all_of_it() -> None:
    (seconds,) = op_seconds([signature("aten.embedding.default", [(128256, 4096), (8,)], (8, 4096))], H100)
    assert seconds < 1e-5


def test_float32_is_rounded_where_the_program_allows_it_and_the_device_can() -> None:
    full = signature("aten.mm.default", [(8192, 8192), (8192, 8192)], (8192, 8192), dtype="float32")
    rounded = full.replace(is_tf32=True)
    in_full, in_tf32 = op_seconds([full, rounded], H100)
    rates = H100.dense_flops_per_s
    assert rates.float32 is not None
    assert rates.tf32 is not None
    assert in_full / in_tf32 == pytest.approx(rates.tf32.value / rates.float32.value, rel=0.05)
    older = H100.replace(dense_flops_per_s=rates.replace(tf32=None))
    assert op_seconds([rounded], older) == pytest.approx(in_full)


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_a_format_that_nobody_gave_a_rate_for_is_named(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=dtype):
        op_seconds([signature("aten.mm.default", [(8, 8), (8, 8)], (8, 8), dtype=dtype)], H100)


def test_a_rate_that_is_missing_is_named() -> None:
    with pytest.raises(UnsupportedError, match="no memory_bytes_per_s"):
        op_seconds([matmul(8, 8, 8)], H100.replace(memory_bytes_per_s=None))


def test_attention_that_nobody_knows_is_named() -> None:
    with pytest.raises(UnsupportedError, match="flex_attention"):
        op_seconds([signature("higher_order.flex_attention.default", [(1, 1, 8, 8)] * 3, (1, 1, 8, 8))], H100)


def figure(value: float) -> Figure:
    return Figure(value=value, source=_SOURCE)


def line(op: str, start_s: float, bytes_per_s: float | None = None, flops_per_s: float | None = None) -> OpLine:
    rates = [None if rate is None else figure(rate) for rate in (bytes_per_s, flops_per_s)]
    return OpLine(op=op, dtype="float32", start_s=figure(start_s), bytes_per_s=rates[0], flops_per_s=rates[1])


HOST = load_cluster("cpu-local").device.replace(
    op_lines=(
        line("aten.mm.default", 1e-5, None, 1e11),
        line("aten.add.Tensor", 2e-5, 1e10),
        line("aten.mul.Tensor", 3e-5, 2e10),
        line("aten.silu.default", 4e-5, 4e10),
    )
)


def test_on_a_host_operators_take_what_was_measured() -> None:
    product = signature("aten.mm.default", [(64, 64)] * 2, (64, 64), dtype="float32")
    added = signature("aten.add.Tensor", [(1000,)] * 2, (1000,), dtype="float32")
    rolled = signature("aten.roll.default", [(1000,)], (1000,), dtype="float32")
    empty = signature("aten.empty.memory_format", [], (1000,), dtype="float32")
    gathered = signature("c10d._allgather_base_.default", [(1000,)], (2000,), dtype="float32")
    seconds = op_seconds([product, added, rolled, empty, gathered], HOST)
    # One that was not measured has the median of starts and of rates; an allocation starts, too, and moves no bytes.
    of_others = [2.5e-5 + 8000 / 2e10, 2.5e-5]
    assert seconds == pytest.approx([1e-5 + 2 * 64**3 / 1e11, 2e-5 + 12000 / 1e10, *of_others, 0.0])


def test_flops_that_nobody_measured_on_a_host_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"_scaled_dot_product_cudnn_attention of bfloat16.*float32"):
        op_seconds([attention(2, 16, 8, is_backward=False)], HOST)


def test_a_host_that_nobody_calibrated_is_told_how() -> None:
    with pytest.raises(UnsupportedError, match="meshwright calibrate"):
        op_seconds([matmul(8, 8, 8)], HOST.replace(op_lines=()))
