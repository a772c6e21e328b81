"""A matmul takes as long as its tiles in waves: never less than its FLOPs, and more where a side does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.compute.matmul import MatmulSizes, is_misaligned, matmul_bytes, tile_flops
from meshwright.cost.constants import fitted_constants

A100_SMS, H100_SMS = 108, 132
sides = st.integers(1, 40_000).map(float)


def tiles(m: float, n: float, k: float, groups: float = 1, sms: float = H100_SMS, small_tile: float = 1.0) -> float:
    one = np.ones(1)
    return float(tile_flops(MatmulSizes(m * one, n * one, k * one, groups * one), sms * one, small_tile)[0])


def routed_tiles(m: float, n: float, k: float, groups: float) -> float:
    one = np.ones(1)
    sizes = MatmulSizes(m * one, n * one, k * one, groups * one, is_routed=True)
    return float(tile_flops(sizes, H100_SMS * one, 1.0)[0])


@given(sides, sides, sides, st.integers(1, 64), st.sampled_from([80, A100_SMS, H100_SMS, 148, 304]))
def test_no_matmul_takes_less_than_its_flops(m: float, n: float, k: float, groups: int, sms: int) -> None:
    assert tiles(m, n, k, groups, sms) >= 2 * groups * m * n * k * (1 - 1e-12)


@given(sides, sides, sides, st.integers(1, 16))
def test_a_larger_matmul_never_takes_less(m: float, n: float, k: float, groups: int) -> None:
    own = tiles(m, n, k, groups) * (1 - 1e-12)
    for larger in (tiles(m + 1, n, k, groups), tiles(m, n + 1, k, groups), tiles(m, n, k + 1, groups)):
        assert larger >= own
    assert tiles(m, n, k, groups + 1) >= own


@given(sides, sides, sides, st.integers(2, 64))
def test_routed_groups_take_their_flops_and_more_rows_more(m: float, n: float, k: float, groups: int) -> None:
    own = routed_tiles(m, n, k, groups)
    assert own >= 2 * groups * m * n * k * (1 - 1e-12)
    assert routed_tiles(m + 1, n, k, groups) >= own * (1 - 1e-12)


@pytest.mark.parametrize("num_rows", [1024, 4096])
def test_groups_of_any_size_take_what_many_of_them_do_in_the_mean(num_rows: int) -> None:
    n, k, groups = H100_SMS * 128.0, 7168.0, 32
    spread = np.arange(num_rows - 128, num_rows + 128)
    mean = np.mean([tiles(float(m), n, k, groups) for m in spread])
    assert routed_tiles(num_rows, n, k, groups) == pytest.approx(mean, rel=0.03)


@given(sides, sides, sides, st.floats(0.5, 0.99))
def test_devices_that_need_large_tiles_lose_where_tiles_are_small(m: float, n: float, k: float, share: float) -> None:
    assert tiles(m, n, k, small_tile=share) >= tiles(m, n, k) * (1 - 1e-12)


@pytest.mark.parametrize("waves", [4, 64])
def test_full_waves_of_full_tiles_take_their_flops_and_the_prologue(waves: int) -> None:
    m, n, k = waves * 256.0, H100_SMS * 128.0, 16_384.0
    assert tiles(m, n, k) == pytest.approx(2 * m * n * k * (1 + 128 / k))


def test_the_prologue_weighs_less_the_deeper_the_sum() -> None:
    waste = [
        tiles(2560.0, H100_SMS * 128.0, k) / (2 * 2560.0 * H100_SMS * 128.0 * k) for k in (512.0, 4096.0, 65_536.0)
    ]
    assert waste[0] > waste[1] > waste[2]
    assert waste[2] < 1.005


def test_one_row_of_tiles_more_than_full_waves_costs_more_than_its_flops() -> None:
    # NVIDIA's performance guide: throughput falls by almost half just after one full wave, and less after many.
    def waste_after(waves: int) -> float:
        m, n, k = 256.0, waves * A100_SMS * 128.0, 4096.0
        full, more = tiles(m, n, k, sms=A100_SMS), tiles(m, n + 128, k, sms=A100_SMS)
        return (more / (n + 128)) / (full / n)

    assert waste_after(1) > 1.1
    assert waste_after(1) > waste_after(4) > waste_after(16) > 1.0


def test_throughput_rises_again_within_the_next_wave() -> None:
    rates = [n / tiles(256.0, n, 4096.0, sms=A100_SMS) for n in (128.0 * (A100_SMS + 1), 128.0 * A100_SMS * 2)]
    assert rates[0] < rates[1]


def test_many_experts_of_few_rows_take_longer_than_one_matmul_of_as_many_flops() -> None:
    assert tiles(32, 2048, 7168, groups=64) > 1.5 * tiles(32 * 64, 2048, 7168)


def test_a_side_one_over_a_tile_pays_for_another() -> None:
    assert tiles(1025, 8192, 8192) > tiles(1024, 8192, 8192) * 1.05


def test_the_hidden_sizes_tried_for_bloom_differ_in_the_known_direction() -> None:
    # BLOOM's chronicles: with tp 4, hidden 13,824 reached more TFLOP/s than 14,400, whose parts fill tiles in part.
    def waste(hidden: float, tp: int = 4, tokens: float = 2 * 2048.0) -> float:
        shapes = [
            (3 * hidden / tp, hidden),
            (hidden, hidden / tp),
            (4 * hidden / tp, hidden),
            (hidden, 4 * hidden / tp),
        ]
        slow = [float(is_misaligned(np.array(n), np.array(k), np.array(2.0))) for n, k in shapes]
        times = sum(
            tiles(tokens, n, k, sms=A100_SMS) * fitted_constants()["misaligned"] ** s
            for (n, k), s in zip(shapes, slow, strict=True)
        )
        return float(times / sum(2 * tokens * n * k for n, k in shapes))

    assert waste(14_400) > waste(13_824) * 1.01


def test_misaligned_is_a_row_that_is_no_multiple_of_128_bytes() -> None:
    n, k = np.array([4096.0, 4097.0, 4096.0, 4160.0]), np.array([4096.0, 4096.0, 4100.0, 4160.0])
    assert is_misaligned(n, k, np.array(2.0)).tolist() == [0, 1, 1, 0]
    assert is_misaligned(n, k, np.array(1.0)).tolist() == [0, 1, 1, 1]


@given(sides, sides, sides, st.integers(1, 16))
def test_bytes_are_both_inputs_and_the_output_of_each_group(m: float, n: float, k: float, groups: int) -> None:
    one = np.ones(1)
    num_bytes = matmul_bytes(m * one, n * one, k * one, groups * one, 1.0 * one)
    assert num_bytes[0] == pytest.approx(groups * (m * k + k * n + 2 * m * n))
