"""RateTable: what was measured where it was measured, something in between elsewhere, the edge outside."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.hardware.catalogue import load_device
from meshwright.hardware.rates import RateTable, attention_rates, matmul_rates, memory_op_rates
from meshwright.spec.machine.device import Figure, MatmulPoint, Source

SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=4, unique=True)


@st.composite
def grids(draw: st.DrawFn) -> dict[tuple[int, ...], float]:
    axes = [draw(SIZES) for _ in range(draw(st.integers(1, 3)))]
    return {corner: draw(st.floats(1e3, 1e15)) for corner in itertools.product(*axes)}


@given(grids())
def test_a_measured_size_has_its_measured_rate(rates: dict[tuple[int, ...], float]) -> None:
    table = RateTable(rates)
    for sizes, rate in rates.items():
        assert table(*sizes) == pytest.approx(rate)


@given(grids(), st.data())
def test_no_size_is_faster_or_slower_than_all_that_were_measured(
    rates: dict[tuple[int, ...], float], data: st.DataObject
) -> None:
    num_axes = len(next(iter(rates)))
    sizes = [np.array(data.draw(st.lists(st.integers(1, 10**8), min_size=5, max_size=5))) for _ in range(num_axes)]
    found = RateTable(rates)(*sizes)
    assert found.shape == (5,)
    assert (found >= 0.999 * min(rates.values())).all()
    assert (found <= 1.001 * max(rates.values())).all()


def test_between_two_sizes_the_rate_is_their_geometric_mean() -> None:
    assert RateTable({(100,): 1e9, (10_000,): 4e9})(1000) == pytest.approx(2e9)


def test_a_hole_in_the_grid_is_told() -> None:
    source = Source(title="me", date="2026", kind="measured")
    points = [
        MatmulPoint(
            dtype="float32", num_rows=rows, num_columns=8, inner=inner, flops_per_s=Figure(value=1e9, source=source)
        )
        for rows, inner in ((8, 8), (8, 16), (16, 8))
    ]
    device = load_device("h100-sxm").replace(matmul_points=tuple(points))
    with pytest.raises(ConfigError, match=r"device h100-sxm: matmul_points .*no point at \(16, 8, 16\)"):
        matmul_rates(device, "float32")


def test_what_nobody_measured_is_none() -> None:
    device = load_device("h100-sxm")
    assert matmul_rates(device, "bfloat16") is None
    assert attention_rates(device, "bfloat16") == (None, None)
    assert memory_op_rates(device, "norm", "bfloat16") == (None, None)
