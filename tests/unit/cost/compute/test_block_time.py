"""One block's seconds follow from what it computes: backward is more than forward, kernels and formats decide."""

from __future__ import annotations

import numpy as np
import pytest

from cost_configs import MODELS, changed, configs, training_setup
from meshwright.cost.achieved_rates import peaks_of, rates_of
from meshwright.cost.blocks.block_table import BLOCK
from meshwright.cost.blocks.work import work_of
from meshwright.cost.compute.block_time import BlockPricer, BlockTimes
from meshwright.cost.constants import fitted_constants
from meshwright.cost.training_setup import TrainingSetup
from meshwright.spec.layout.layout import Layout


def priced(of: TrainingSetup, layout: Layout | None = None) -> tuple[BlockTimes, int]:
    """Return the times of every part of the model, and the position of its last kind of block."""
    work = work_of(configs(of, layout or Layout()))
    peaks = peaks_of((of,))
    constants = fitted_constants()
    times = BlockPricer(work, (of,), peaks).price(rates_of((of,), peaks, constants), constants)
    return times, int(np.flatnonzero(work.blocks.kind == BLOCK)[-1])


def matmul_s(of: TrainingSetup) -> float:
    times, block = priced(of)
    return float(times.matmul[0][block])


def memory_s(of: TrainingSetup) -> float:
    times, block = priced(of)
    return float(times.memory[0][block])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stack", ["generic", "megatron-core-2024", "megatron-2020"])
def test_backward_is_more_than_forward(model: str, stack: str) -> None:
    times, block = priced(training_setup(model, stack=stack))
    for forward, backward in (times.matmul, times.attention):
        assert 1.3 < backward[block] / forward[block] < 4
    # Gradients are added up besides.
    assert times.memory[1][block] > 1.5 * times.memory[0][block]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_reached_lies_between_the_peak_and_what_tiles_leave(model: str) -> None:
    times, block = priced(training_setup(model))
    assert 3 * times.ideal_matmul[block] < times.reached_matmul[block] < times.matmul[0][block] + times.matmul[1][block]
    assert times.ideal_attention[block] < times.attention[0][block]


def test_eight_bits_are_faster_than_sixteen_but_pay_for_casts() -> None:
    wide, narrow = training_setup("llama3-70b"), training_setup("llama3-70b", precision="float8-tensorwise")
    assert 0.45 * matmul_s(wide) < matmul_s(narrow) < 0.75 * matmul_s(wide)
    assert memory_s(narrow) > memory_s(wide)


def test_the_head_stays_in_16_bits() -> None:
    (wide, _), (narrow, _) = (priced(training_setup(precision=name)) for name in ("bfloat16", "float8-tensorwise"))
    assert narrow.matmul[0][-1] == wide.matmul[0][-1]


def test_scales_of_rows_cost_more_than_one_of_a_tensor() -> None:
    tensor, rows = (training_setup(precision=name) for name in ("float8-tensorwise", "float8-rowwise"))
    assert matmul_s(rows) > matmul_s(tensor)


def test_kernels_that_are_joined_pass_over_memory_less() -> None:
    eager, compiled, fused = (
        memory_s(changed(training_setup(), kernels=name)) for name in ("eager", "compiled", "fused")
    )
    assert eager > 1.3 * compiled
    assert eager > 1.3 * fused


def test_attention_without_flash_passes_over_all_scores() -> None:
    of = training_setup(seq_len=8192)
    (flash, block), (unfused, _) = (priced(changed(of, attention=name)) for name in ("flash", "unfused"))
    assert unfused.attention[0][block] > 2 * flash.attention[0][block]


def test_attention_grows_with_the_square_of_the_sequence_and_matmuls_with_it() -> None:
    (short, block), (long, _) = (priced(training_setup(seq_len=length)) for length in (8192, 32_768))
    # Longer sequences also fill the device better, and start no more kernels.
    assert 12 < long.attention[0][block] / short.attention[0][block] <= 16
    assert 3.8 < long.matmul[0][block] / short.matmul[0][block] <= 4.01
    assert 3 < long.memory[0][block] / short.memory[0][block] <= 4.01


def test_tp_shares_matmuls_at_a_loss() -> None:
    (whole, block), (split, _) = priced(training_setup()), priced(training_setup(), Layout(tp=8))
    assert 1 / 8 < split.matmul[0][block] / whole.matmul[0][block] < 1 / 4
    assert split.attention[0][block] == pytest.approx(whole.attention[0][block] / 8)


def test_graphs_spare_the_host() -> None:
    seconds = []
    for graphs in ("none", "routing", "blocks", "step"):
        times, block = priced(changed(training_setup(), cuda_graphs=graphs))
        seconds.append(float(times.host[0][block]))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.2 * seconds[0]


def test_a_small_block_waits_for_the_host_and_a_large_one_does_not() -> None:
    (small, block), (large, _) = priced(training_setup("qwen3-0.6b", seq_len=256)), priced(training_setup("llama3-70b"))
    assert small.host[0][block] > small.matmul[0][block]
    assert large.host[0][block] < 0.1 * large.matmul[0][block]


def test_experts_one_kernel_each_take_longer() -> None:
    of = training_setup("deepseek-v3", seq_len=512)
    grouped, apart = (matmul_s(changed(of, grouped_experts=is_on)) for is_on in (True, False))
    assert apart > grouped + 200 * fitted_constants()["kernel_s"]


def test_gradients_summed_in_bfloat16_move_half() -> None:
    # Only where whole gradients stay: FSDP's are scattered.
    of = changed(training_setup(), sharding="optimizer")
    (wide, block), (narrow, _), (sharded, _) = (
        priced(changed(of, **fields))
        for fields in ({}, {"gradient_accumulation_dtype": "bfloat16"}, {"sharding": "parameters"})
    )
    sums = wide.memory[1][block] - sharded.memory[1][block]
    assert sums > 0
    assert narrow.memory[1][block] - sharded.memory[1][block] == pytest.approx(sums / 2)
