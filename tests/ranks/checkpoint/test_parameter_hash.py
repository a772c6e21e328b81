"""One hash stands for all parameters, whatever the layout, and any change of an element changes it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hand_made
from meshwright.checkpoint.parameter_hash import parameter_hash
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks

LAYOUTS = [
    Layout(dp_replicate=2, tp=2),
    Layout(dp_shard=2, tp=2, ep=4),
    Layout(pp=2, tp=2, ep=2, schedule="ZBVZeroBubble"),
    Layout(dp_shard=4, tp=2, ep=2, etp=1),
    pytest.param(Layout(), marks=pytest.mark.long),
    pytest.param(Layout(dp_shard=4), marks=pytest.mark.long),
    pytest.param(Layout(pp=2, dp_shard=2), marks=pytest.mark.long),
    pytest.param(Layout(pp=2, dp_shard=2, tp=2, ep=2), marks=pytest.mark.long),
]


def hash_on_ranks(layout: Layout) -> str:
    model, _ = hand_made.build(layout)
    return parameter_hash(canonical_parameters(model))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_same_hash(layout: Layout) -> None:
    digest, *others = run_ranks(hash_on_ranks, layout.num_ranks, layout)
    assert others == [""] * len(others)
    assert digest == parameter_hash(hand_made.all_values().items())


@given(st.integers(0, 2**20), st.integers(0, 2**20), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_a_changed_or_moved_element_changes_the_hash(i: int, j: int, dtype: torch.dtype) -> None:
    values = torch.arange(600 * 500).to(dtype).view(600, 500)
    before = parameter_hash([("w", values)])
    i, j = i % values.numel(), j % values.numel()
    changed = values.clone()
    changed.view(-1)[[i, j]] = values.view(-1)[[j, i]]
    assert (parameter_hash([("w", changed)]) == before) == torch.equal(changed, values)
    flipped = values.clone().view(torch.uint8)
    flipped.view(-1)[i] ^= 1 << (j % 8)
    assert parameter_hash([("w", flipped.view(dtype))]) != before


def test_names_shapes_and_dtypes_count() -> None:
    values = torch.zeros(4, 6)
    hashes = {
        parameter_hash([("w", values)]),
        parameter_hash([("v", values)]),
        parameter_hash([("w", values.view(6, 4))]),
        parameter_hash([("w", values.half())]),
        parameter_hash([("w", values), ("v", values)]),
        parameter_hash([("w", -values)]),
    }
    assert len(hashes) == 6
