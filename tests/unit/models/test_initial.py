"""Initial weights depend on (seed, name, element index) alone, and are normal."""

import hashlib
import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.models.initial import fill_normal, initialize
from meshwright.models.llama import Llama
from meshwright.spec.model.presets import PRESETS


def normal(shape: tuple[int, ...], *, seed: int = 0, name: str = "weight", std: float = 1.0) -> Tensor:
    out = torch.empty(shape)
    fill_normal(out, seed=seed, name=name, global_shape=shape, offsets=(0,) * len(shape), std=std)
    return out


@st.composite
def shape_and_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    return shape, cuts


@pytest.mark.slow
@settings(deadline=None)
@given(shape_and_cuts(), st.integers(0, 2**40), st.text(max_size=5))
def test_shards_are_slices_of_the_whole(cut: tuple[tuple[int, ...], list[list[int]]], seed: int, name: str) -> None:
    shape, cuts = cut
    whole = normal(shape, seed=seed, name=name)
    for box in product(*(list(pairwise(ends)) for ends in cuts)):
        part = torch.full([end - start for start, end in box], math.nan)
        offsets = [start for start, _ in box]
        fill_normal(part, seed=seed, name=name, global_shape=shape, offsets=offsets, std=1.0)
        assert torch.equal(part, whole[tuple(slice(*ends) for ends in box)])


@pytest.mark.parametrize("box", [(slice(0, 3), slice(0, 70_001)), (slice(1, 2), slice(65_535, 65_537))])
def test_runs_longer_than_a_chunk(box: tuple[slice, slice]) -> None:
    whole = normal((3, 70_001))
    part = torch.empty_like(whole[box])
    offsets = [ends.start for ends in box]
    fill_normal(part, seed=0, name="weight", global_shape=(3, 70_001), offsets=offsets, std=1.0)
    assert torch.equal(part, whole[box])


def test_memory_order_does_not_matter() -> None:
    strided = torch.empty(6, 4).t()
    fill_normal(strided, seed=0, name="weight", global_shape=(4, 6), offsets=(0, 0), std=1.0)
    assert torch.equal(strided, normal((4, 6)))


def test_empty_shard_is_left_alone() -> None:
    fill_normal(torch.empty(0, 4), seed=0, name="weight", global_shape=(3, 4), offsets=(3, 0), std=1.0)


def test_other_dtypes_are_rounded_once() -> None:
    out = torch.empty(64, dtype=torch.bfloat16)
    fill_normal(out, seed=0, name="weight", global_shape=(64,), offsets=(0,), std=1.0)
    assert (out.float() - normal((64,))).abs().max() < 0.02


def reference(seed: int, name: str, index: int) -> float:
    """Return the element by the published recipes alone: splitmix64's mixer and Box-Muller, in Python's integers."""
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(half, "little") for half in (key[:8], key[8:]))
    bits = (index * 0x9E3779B97F4A7C15 + first) % 2**64
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) % 2**64 ^ second
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) % 2**64
    bits ^= bits >> 31
    radius = math.sqrt(-2 * math.log(((bits >> 32) + 0.5) / 2**32))
    angle = math.pi / 2 * ((bits >> 1) % 2**31 + 0.5) / 2**31
    return (-1) ** (bits & 1) * radius * math.cos(angle)


def test_values_are_those_of_the_recipe_written_out() -> None:
    values = normal((50, 20), seed=7, name="blocks.0.ffn.up.weight").flatten()
    expected = torch.tensor([reference(7, "blocks.0.ffn.up.weight", index) for index in range(1000)])
    torch.testing.assert_close(values, expected, rtol=2e-7, atol=0)


def test_indices_beyond_32_bits() -> None:
    part, start = torch.empty(2, 3), 2**33
    shape = (2**34, 3)
    fill_normal(part, seed=7, name="w", global_shape=shape, offsets=(start, 0), std=1.0)
    expected = [reference(7, "w", 3 * start + index) for index in range(6)]
    torch.testing.assert_close(part.flatten(), torch.tensor(expected), rtol=2e-7, atol=0)


def test_values_do_not_change_between_versions() -> None:
    # A change here changes every run that starts from a seed: it needs an entry in the changelog.
    assert normal((3,), seed=0, name="head.weight").tolist() == [
        -1.663820505142212,
        -0.32541942596435547,
        2.230372905731201,
    ]


def test_moments_and_tails_are_those_of_a_normal() -> None:
    values = normal((2**20,)).double()
    error = 1 / math.sqrt(values.numel())
    assert abs(values.mean()) < 4 * error
    assert abs(values.var() - 1) < 4 * math.sqrt(2) * error
    assert abs((values**3).mean()) < 4 * math.sqrt(15) * error
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96) * error
    theory = 0.5 * (1 + torch.erf(values.sort().values / math.sqrt(2)))
    distance = (theory - torch.arange(1, values.numel() + 1) / values.numel()).abs().max()
    assert distance < 1.95 * error, "Kolmogorov-Smirnov at the 0.1 % level"
    assert 4.4 < values.abs().max() < 6.8


def test_neighbours_rows_seeds_and_names_are_unrelated() -> None:
    values = normal((1024, 1024)).double()
    others = [
        values.roll(1, 0),
        values.roll(1, 1),
        normal((1024, 1024), seed=1).double(),
        normal((1024, 1024), name="weight2").double(),
    ]
    for other in others:
        assert abs((values * other).mean()) < 4 / 1024


def test_std_scales() -> None:
    assert torch.allclose(normal((1000,), std=0.02), 0.02 * normal((1000,)), rtol=1e-6)


def test_initialize_fills_a_model_by_its_own_rule() -> None:
    model = Llama(PRESETS["llama-1m"])
    initialize(model, seed=3)
    weights = model.state_dict()
    assert torch.equal(weights["norm.weight"], torch.ones(128))
    std = math.sqrt(2 / (5 * 128))
    assert weights["blocks.1.ffn.up.weight"].std().item() == pytest.approx(std, rel=0.02)
    assert weights["blocks.1.ffn.down.weight"].std().item() == pytest.approx(std / math.sqrt(8), rel=0.02)
    again = Llama(PRESETS["llama-1m"])
    initialize(again, seed=3)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
