"""Terms that are rounded to a fixed point add up to the same bits in any order and any grouping."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwright.parallelism.exact_sums import GRADIENT_LIMIT_BITS, FixedPoint, digits_of_squares
from meshwright.spec.job.sections import OptimizerSection
from meshwright.trainer.optimizer.optimizer import build_optimizer

LIMIT = 2.0**GRADIENT_LIMIT_BITS
BELOW = math.nextafter(LIMIT, 0)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TERMS = st.lists(st.floats(-BELOW, BELOW) | st.floats(-1e-9, 1e-9), min_size=1, max_size=40)


def rounded(terms: list[float], dtype: torch.dtype, *, num_terms: int | None = None) -> Tensor:
    """Return the terms in `dtype`, below the limit and rounded to their fixed point, in float64."""
    values = torch.tensor(terms, dtype=dtype)
    values = values.where(values.abs() < LIMIT, 0)
    FixedPoint.of_terms(num_terms or len(terms), GRADIENT_LIMIT_BITS).round_([values])
    return values.double()


@given(terms=TERMS, dtype=DTYPES, data=st.data())
def test_any_order_and_grouping_gives_the_same_bits(
    terms: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    values = rounded(terms, dtype).tolist()
    shuffled = data.draw(st.permutations(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    groups = [shuffled[start:end] for start, end in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    total = torch.stack([torch.tensor(group, dtype=torch.float64).sum() for group in groups]).sum().item()
    assert total == math.fsum(values)


@given(terms=TERMS, dtype=DTYPES)
def test_a_term_moves_by_half_a_unit_at_most(terms: list[float], dtype: torch.dtype) -> None:
    exact = torch.tensor(terms, dtype=dtype)
    exact = exact.where(exact.abs() < LIMIT, 0).double()
    unit = 2.0 ** FixedPoint.of_terms(len(terms), GRADIENT_LIMIT_BITS).unit_bits
    assert unit < len(terms) * 2.0**-39
    assert ((rounded(terms, dtype) - exact).abs() <= unit / 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_reaches_the_limit_is_infinite(dtype: torch.dtype) -> None:
    values = torch.tensor([LIMIT, -2 * LIMIT, math.nan, LIMIT / 2], dtype=dtype)
    FixedPoint.of_terms(60, GRADIENT_LIMIT_BITS).round_([values])
    assert values.tolist()[:2] == [math.inf, -math.inf]
    assert values[2].isnan()
    assert values[3] == LIMIT / 2


def test_without_rounding_the_order_shows() -> None:
    terms = [1.0, -1.0, 2.0**-60]
    assert sum(terms) != sum(reversed(terms))
    values = rounded(terms, torch.float32).tolist()
    assert sum(values) == sum(reversed(values))


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-4, 4, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32), min_size=1, max_size=60),
    data=st.data(),
)
def test_digits_of_squares_add_up_whatever_the_shards(values: list[float], data: st.DataObject) -> None:
    whole, exponent = torch.tensor(values), 3
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    shards = whole.tensor_split(cuts)
    digits = digits_of_squares(whole, exponent)
    assert torch.stack([digits_of_squares(shard, exponent) for shard in shards]).sum(0).equal(digits)
    high, low = digits.tolist()
    unit = Fraction(2 ** (2 * exponent), 2**60)
    missing = sum(Fraction(value) ** 2 for value in values) - ((high << 30) + low) * unit
    assert 0 <= missing <= len(values) * unit


def updated(sizes: list[int], *, is_exact: bool) -> Tensor:
    """Return parameters after three steps of AdamW, as tensors of these sizes."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(sum(sizes), generator=generator)

    model = nn.ParameterList([part.clone() for part in draw().split(sizes)])
    optimizer = build_optimizer(model, OptimizerSection(), is_exact=is_exact)
    for _ in range(3):
        for parameter, gradient in zip(model, (draw() * 10 ** draw()).split(sizes), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in model])


def test_an_exact_update_does_not_depend_on_the_size_of_a_shard() -> None:
    sizes = [7] * 500
    whole, shards = (updated(one, is_exact=True) for one in ([sum(sizes)], sizes))
    assert shards.equal(whole)
    assert torch.allclose(whole, updated([sum(sizes)], is_exact=False), atol=1e-6)


def test_it_is_not_the_fused_kernel() -> None:
    kinds = [
        build_optimizer(nn.Linear(2, 2), OptimizerSection(), is_exact=is_exact).param_groups[0]["fused"]
        for is_exact in (False, True)
    ]
    assert kinds == [True, False]
