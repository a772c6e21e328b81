"""A machine that somebody measured: what was timed stands in for formulas, and a host's seconds add."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from cost_configs import configs, training_setup
from meshwright.cost.host.host_block_time import KERNELS_PER_OP
from meshwright.cost.layout_table import layout_table
from meshwright.cost.step_times import step_times
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.errors import UnsupportedError
from meshwright.models.llama import LlamaBlock
from meshwright.models.rope import rope_tables
from meshwright.parallelism.torch_private.torch_dispatch import count_kernels
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster, Link
from meshwright.spec.machine.device import (
    AttentionPoint,
    CollectivePoint,
    Device,
    Figure,
    MatmulPoint,
    MatmulRates,
    MemoryOp,
    MemoryOpPoint,
    Source,
)
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.op import CoreAttention
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.model.weight_shapes import weight_shapes
from meshwright.spec.step.estimate import StepDecomposition

SOURCE = Source(title="made up", date="2026", kind="measured")
SEQ_LEN, BATCH = 256, 8
OPS: tuple[MemoryOp, ...] = ("add", "swiglu", "norm", "rope", "loss")


def figure(value: float) -> Figure:
    return Figure(value=value, source=SOURCE)


def matmul_points(**rate_of_rows: float) -> tuple[MatmulPoint, ...]:
    """Return points of `rows64=1e9` and its like."""
    return tuple(
        MatmulPoint(dtype="float32", num_rows=int(rows[4:]), num_columns=8, inner=8, flops_per_s=figure(rate))
        for rows, rate in rate_of_rows.items()
    )


def memory_point(op: MemoryOp, forward: float, backward: float | None) -> MemoryOpPoint:
    return MemoryOpPoint(
        op=op,
        dtype="float32",
        num_elements=1000,
        forward_elements_per_s=figure(forward),
        backward_elements_per_s=None if backward is None else figure(backward),
    )


DEVICE = Device(
    name="made-up",
    title="made up",
    vendor="any",
    memory_bytes=figure(16e9),
    memory_bytes_per_s=figure(40e9),
    measured_matmul_flops_per_s=MatmulRates(float32=figure(1e9)),
    host_launch_s=figure(1e-5),
    is_host=True,
    matmul_points=matmul_points(rows64=1e9),
    attention_points=(
        AttentionPoint(
            dtype="float32",
            num_heads=4,
            seq_len=256,
            head_dim=32,
            forward_flops_per_s=figure(5e8),
            backward_flops_per_s=figure(1e9),
        ),
    ),
    memory_op_points=(
        *(memory_point(op, 1e8, 5e7) for op in OPS),
        memory_point("update", 1e8, None),
        memory_point("clip", 4e8, None),
    ),
)


def collective(kind: Any, latency_s: float, bytes_per_s: float) -> CollectivePoint:
    return CollectivePoint(kind=kind, num_ranks=2, latency_s=figure(latency_s), bytes_per_s=figure(bytes_per_s))


def machine(device: Device = DEVICE) -> Cluster:
    link = Link(
        name="gloo",
        bytes_per_s=figure(1e9),
        collectives=(
            collective("exchange", 1e-3, 1e9),
            collective("all-reduce", 1e-4, 1e9),
            collective("async-all-reduce", 5e-5, 2e9),
        ),
    )
    return Cluster(
        name="mine", title="mine", device=device, num_devices=2, devices_per_node=2, intra_node=link, source=SOURCE
    )


SLOW_HOST = DEVICE.replace(host_launch_s=figure(3e-5))


def of(device: Device = DEVICE, **workload: Any) -> TrainingSetup:
    given = {"seq_len": SEQ_LEN, "global_batch_size": BATCH, "precision": "float32"} | workload
    return training_setup("llama-1m", machine(device), "meshwright", **given)


def step(setup: TrainingSetup, **layout: Any) -> StepDecomposition:
    return step_times(configs(setup, Layout(**layout))).decomposition(0)


def host_s(microbatch_size: int = 1, **workload: Any) -> float:
    """Return the host's own seconds of a step, of which a device that takes three times as long has three."""
    setups = (of(SLOW_HOST, **workload), of(**workload))
    slow, usual = (step(one, microbatch_size=microbatch_size).memory_bound_ops_s for one in setups)
    return (slow - usual) / 2


MODEL = model_spec(PRESETS["llama-1m"])
TOKENS = BATCH * SEQ_LEN
PARAMETERS = sum(group.count * group.num_parameters for group in MODEL.groups)
SHAPES = weight_shapes(PRESETS["llama-1m"]).values()
NUM_TENSORS = len(SHAPES)
MATMUL_FLOPS = 6 * TOKENS * sum(group.count * group.num_matmul_parameters for group in MODEL.groups)


def test_matmuls_take_what_was_measured() -> None:
    taken = step(of(), microbatch_size=2)
    model_flops = TOKENS * MODEL.flops_per_token(SEQ_LEN)
    assert taken.model_flops_at_peak_s == pytest.approx(model_flops / 1e9)
    assert taken.gemm_inefficiency_s + taken.tile_and_wave_quantization_s == pytest.approx(0, abs=1e-9)


def test_between_two_sizes_rates_are_interpolated() -> None:
    # 256 rows are the geometric mean of 64 and 1024, so the rate is that of theirs, 2e9 of at best 4e9.
    device = DEVICE.replace(
        matmul_points=matmul_points(rows64=1e9, rows1024=4e9),
        measured_matmul_flops_per_s=MatmulRates(float32=figure(4e9)),
    )
    taken = step(of(device), microbatch_size=1)
    assert taken.tile_and_wave_quantization_s == pytest.approx(MATMUL_FLOPS / 2e9 - MATMUL_FLOPS / 4e9)


def test_attention_takes_what_was_measured_forward_and_backward() -> None:
    forward = TOKENS * sum(
        group.count * op.forward_flops_per_token(SEQ_LEN)
        for group in MODEL.groups
        for op in group.ops
        if isinstance(op, CoreAttention)
    )
    at_best = 3 * forward / 1e9
    assert step(of()).attention_inefficiency_s + at_best == pytest.approx(forward / 5e8 + 2.5 * forward / 1e9)


def test_what_moves_numbers_takes_what_was_measured() -> None:
    sizes = PRESETS["llama-1m"]
    rope = sizes.attention_dim + sizes.kv_dim
    block = 2 * sizes.dim + rope + sizes.ffn_dim + 2 * sizes.dim  # norms, rope, gate, residual additions
    ends = sizes.dim + sizes.dim + sizes.vocab_size  # embedding, last norm, loss
    elements = TOKENS * (sizes.num_layers * block + ends)
    # Of one microbatch, whose gradients are added to none.
    taken = step(of(), microbatch_size=BATCH).memory_bound_ops_s - host_s(microbatch_size=BATCH)
    assert taken == pytest.approx(elements / 1e8 + elements / 5e7)


def test_gradients_of_microbatches_are_added_up() -> None:
    one, two = (
        step(of(), microbatch_size=size).memory_bound_ops_s - host_s(microbatch_size=size)
        for size in (BATCH, BATCH // 2)
    )
    # Two numbers are read and one is written; an addition that was timed reads one and writes one.
    assert two - one == pytest.approx(1.5 * PARAMETERS / 1e8)


def test_the_update_takes_what_was_measured() -> None:
    # Scaling moves two thirds of what clipping does, and each tensor has a kernel of each, of norm and of update.
    starts_s = 4 * NUM_TENSORS * 1e-5
    assert step(of()).optimizer_s == pytest.approx(PARAMETERS / 1e8 + 5 / 3 * PARAMETERS / 4e8 + starts_s)


def test_a_hosts_seconds_add_where_it_computes_itself() -> None:
    added_s = host_s(global_batch_size=64)
    assert added_s > 0
    # They are part of its computation, as in a simulation of a host.
    assert step(of(global_batch_size=64)).cpu_bound_s == 0
    # Next to an accelerator, they hide behind seconds of kernels.
    next_to_it = DEVICE.replace(is_host=False, num_sms=figure(100))
    assert step(of(next_to_it, global_batch_size=64)).cpu_bound_s < 0.05 * added_s


@pytest.mark.parametrize(("gradient_sync", "num_reductions"), [("step", 1), ("microbatch", 2)])
def test_units_are_gathered_for_each_pass_and_reduced_as_often_as_asked(
    gradient_sync: str, num_reductions: int
) -> None:
    num_microbatches = 2
    taken = step(of(), dp_shard=2, microbatch_size=2, gradient_sync=gradient_sync)
    blocks = [group for group in MODEL.groups if group.name == "blocks"]
    total = 0.0
    for num_parameters, count, gathers in (
        (blocks[0].num_parameters, blocks[0].count, 2 * num_microbatches),
        (sum(group.num_parameters for group in MODEL.groups if group not in blocks), 1, num_microbatches),
    ):
        num_bytes = 4 * num_parameters
        total += count * (gathers + num_reductions) * (1e-3 + num_bytes / 1e9)
    assert taken.dp_communication_s == pytest.approx(total)
    assert taken.other_communication_s == pytest.approx(2 * (1e-4 + 8 / 1e9))
    assert step(of()).dp_communication_s == 0


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_replicate": 2}, {}])
def test_hosts_whose_kernels_were_not_timed_take_formulas(layout: dict[str, int]) -> None:
    untimed = of(DEVICE.replace(host_launch_s=None, memory_op_points=()))
    times = step_times(configs(untimed, Layout(microbatch_size=2, **layout)))
    assert np.isfinite(times.total_s).all()


def test_replicas_sum_large_gradients_next_to_backward_and_small_ones_at_once() -> None:
    sizes = [4 * prod(shape) for shape in SHAPES]
    large = [size for size in sizes if size >= 64 * 1024]
    assert len(large) == 22
    expected_s = sum(5e-5 + size / 2e9 for size in large) + 1e-4 + (sum(sizes) - sum(large)) / 1e9
    taken = step(of(), dp_replicate=2, microbatch_size=2)
    assert taken.dp_communication_s == pytest.approx(expected_s)


def test_what_nobody_measured_is_priced_as_without_it() -> None:
    other = training_setup("llama3-8b", "h100-ib400", "torchtitan-2025")
    layout = Layout(dp_shard=8)
    alone = step_times(configs(other, layout))
    both = step_times(Configurations((of(), other), np.array([0, 1]), layout_table([Layout(dp_shard=2), layout])))
    assert np.isfinite(both.total_s).all()
    assert both.decomposition(1) == alone.decomposition(0)


def test_a_format_that_nobody_measured_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"made-up has no dense_flops_per_s\.bfloat16"):
        step(of(precision="bfloat16"))


def test_the_kernels_of_an_op_are_those_of_our_block() -> None:
    sizes = PRESETS["llama-1m"]
    block, turns = LlamaBlock(sizes), rope_tables(sizes, torch.arange(16))
    x_BSD = torch.randn(1, 16, sizes.dim, requires_grad=True)
    counted = count_kernels(lambda: block(x_BSD, *turns).sum().backward())
    num_ops = next(len(group.ops) for group in MODEL.groups if group.name == "blocks")
    assert counted / num_ops == pytest.approx(KERNELS_PER_OP, rel=0.2)
