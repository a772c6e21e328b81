"""Weights in 8 and 4 bits: how far they are from what was packed, and that shards of blocks are those of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models.packed_weight import PackedWeight, pack, unpack
from meshwright.spec.step.adapter import BaseDType

# Half of the widest gap between neighbours, of 2 in all, and of the scale's rounding.
LARGEST_ERROR: dict[BaseDType, float] = {"int8": 0.5 / 127 + 0.01, "nf4": 0.153 + 0.01}


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000), rows=st.integers(1, 5), blocks=st.integers(1, 3), size=st.sampled_from([1e-6, 1.0, 50.0])
)
def test_no_element_is_further_off_than_its_block_allows(
    base_dtype: BaseDType, seed: int, rows: int, blocks: int, size: float
) -> None:
    weight_OI = torch.randn(rows, 64 * blocks, generator=torch.Generator().manual_seed(seed)) * size
    weight_OI[0, :64] = 0
    stored, scale_ON = pack(weight_OI, base_dtype)
    assert stored.nbytes == weight_OI.numel() // (2 if base_dtype == "nf4" else 1)
    assert scale_ON.nbytes == weight_OI.numel() // 64 * 2
    found_OI = unpack(stored, scale_ON, torch.float32)
    largest_ON1 = weight_OI.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True)
    error_ONB = (found_OI - weight_OI).unflatten(1, (-1, 64)).abs()
    assert (error_ONB <= largest_ON1 * LARGEST_ERROR[base_dtype]).all()
    assert not found_OI[0, :64].any()
    # Shards of whole blocks, of rows and of columns.
    part, part_scale = pack(weight_OI[-1:, 64 * (blocks - 1) :], base_dtype)
    assert torch.equal(unpack(part, part_scale, torch.float32), found_OI[-1:, 64 * (blocks - 1) :])


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_a_product_has_a_gradient_of_its_input_alone(base_dtype: BaseDType) -> None:
    weight = PackedWeight(*pack(torch.randn(6, 128, dtype=torch.float64), base_dtype))
    x = torch.randn(3, 128, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(weight.times, (x,))
    torch.testing.assert_close(weight.times(x), x @ weight.whole(torch.float64).T)


def test_nf4_has_the_codes_of_torchao() -> None:
    nf4 = pytest.importorskip("torchao.quantization", reason="needs torchao, to compare with")
    weight_OI = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    theirs = nf4.NF4Tensor.from_tensor(weight_OI, 64, 256).get_original_weight()
    ours = unpack(*pack(weight_OI, "nf4"), torch.float32)
    # They quantise scales as well, we round them up to bfloat16.
    assert float((ours - theirs).abs().max() / weight_OI.abs().max()) < 0.3
    assert float((ours - theirs).norm() / weight_OI.norm()) < 0.05
