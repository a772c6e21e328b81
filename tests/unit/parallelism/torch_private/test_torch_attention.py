"""torch's private attention kernels are what the ring takes them for, in the version at hand."""

import pytest
import torch
from torch.nn import functional as F

from meshwright.parallelism.torch_private.torch_attention import (
    flash_attention,
    flash_attention_backward,
    has_flash_kernel,
)

_aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_forward_and_backward_apart_are_those_of_attention(
    dtype: torch.dtype, is_causal: bool, num_kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value, gradient = (
        torch.randn(2, 16, num_heads, 8, generator=generator).to(dtype)
        for num_heads in (4, num_kv_heads, num_kv_heads, 4)
    )
    heads = (query, key, value)
    assert has_flash_kernel(heads, is_causal)
    leaves = [x.clone().requires_grad_() for x in heads]
    inputs = [x.transpose(1, 2) for x in leaves]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, scale=0.4, enable_gqa=True).transpose(1, 2)
    whole = flash_attention(heads, is_causal, 0.4)
    assert whole[1].dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(whole[0], expected)
    expected.backward(gradient)
    for given, leaf in zip(flash_attention_backward(gradient, heads, whole, is_causal, 0.4), leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(given, leaf.grad, rtol=0, atol=0)


def test_the_operators_take_what_they_are_given_on_cuda_too() -> None:
    # Without a GPU, this much of the other half can be known: the names and order of what is passed.
    backward = _aten._scaled_dot_product_flash_attention_backward.default._schema
    names = [argument.name for argument in backward.arguments]
    assert names == [
        *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "philox_seed", "philox_offset", "scale"),
    ]
    forward = _aten._scaled_dot_product_flash_attention.default._schema
    assert [argument.name for argument in forward.arguments][:5] == ["query", "key", "value", "dropout_p", "is_causal"]
    assert [result.name for result in forward.returns][:2] == ["output", "logsumexp"]
