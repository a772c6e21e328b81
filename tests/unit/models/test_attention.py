"""CausalAttention against its definition: documents, grouped heads, widths of their own, a scale, windows, sinks."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.attention.causal_attention import CausalAttention, with_fused_heads


def written_out(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bsnh,btnh->bnst", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("bnst,btnw->bsnw", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("value_width", [8, 6, 12])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("has_documents", [False, True])
def test_attention_is_its_definition(
    num_kv_heads: int, value_width: int, scale: float | None, has_documents: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 10, 4, 8), (2, 10, num_kv_heads, 8), (2, 10, num_kv_heads, value_width))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    visible = torch.ones(10, 10, dtype=torch.bool).tril().expand(2, 1, 10, 10)
    documents = None
    if has_documents:
        documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3], [4, 5, 5, 5, 5, 5, 5, 5, 5, 5]])
        visible = visible & (documents[:, :, None] == documents[:, None, :])[:, None]
    attended = CausalAttention(scale)(query, key, value, documents)
    torch.testing.assert_close(attended, written_out(query, key, value, visible, scale), rtol=0, atol=1e-13)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 16])
@pytest.mark.parametrize("value_width", [8, 6])
@pytest.mark.parametrize("has_documents", [False, True])
def test_windows_and_sinks_are_their_definition(
    num_kv_heads: int, window: int | None, value_width: int, has_documents: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 13, 4, 8), (2, 13, num_kv_heads, 8), (2, 13, num_kv_heads, value_width), (4,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, sinks = tensors
    position = torch.arange(13)
    visible = (position[None] <= position[:, None]) & (position[None] > position[:, None] - (window or 13))
    documents = torch.arange(13).div(4, rounding_mode="floor").expand(2, -1) if has_documents else None
    if documents is not None:
        visible = visible & (documents[0][:, None] == documents[0][None])
    # A sink is a key of its own with the value 0, which every query sees.
    sees_sink = torch.cat((torch.ones(13, 1, dtype=torch.bool), visible), dim=1)
    all_heads = [x.repeat_interleave(4 // num_kv_heads, dim=2) for x in (key, value)]
    scores = torch.einsum("bsnh,btnh->bnst", query, all_heads[0]) / 8**0.5
    scores = torch.cat((sinks[None, :, None, None].expand(2, -1, 13, 1), scores), dim=-1)
    weights = scores.masked_fill(~sees_sink, -torch.inf).softmax(-1)[..., 1:]
    expected = torch.einsum("bnst,btnw->bsnw", weights, all_heads[1])
    attention = CausalAttention(window=window)
    attended = attention(query, key, value, documents, sinks)
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-13)
    direction = torch.randn(attended.shape, dtype=torch.float64, generator=generator)
    gradients = torch.autograd.grad(attended, tensors, direction)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, tensors, direction), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for num_new in (1, 3):
        if documents is None:
            last = attention(query[:, -num_new:], key, value, None, sinks)
            torch.testing.assert_close(last, expected[:, -num_new:], rtol=0, atol=1e-13)


def test_a_window_takes_memory_linear_in_the_sequence() -> None:
    heads = [torch.empty(1, 2**20, 2, 8, device="meta") for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        CausalAttention(window=128)(*heads)
    # Two matmuls of 2**20 queries of 2 heads with 256 keys.
    assert counter.get_total_flops() == 2 * 2 * 2**20 * 2 * 256 * 8


@pytest.mark.parametrize("num_new", [1, 3, 10])
def test_queries_are_the_last_positions(num_new: int) -> None:
    query, key, value = torch.randn(3, 2, 10, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attention = CausalAttention()
    whole = attention(query, key, value)
    torch.testing.assert_close(attention(query[:, -num_new:], key, value), whole[:, -num_new:], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("device", "dtype", "num_heads"),
    [("meta", torch.float32, 6), ("meta", torch.bfloat16, 2), ("cpu", torch.float32, 2)],
)
def test_keys_get_all_heads_where_no_fused_kernel_shares_them(device: str, dtype: torch.dtype, num_heads: int) -> None:
    query = torch.empty(2, 5, 6, 8, dtype=dtype, device=device)
    key, value = (torch.empty(2, 5, 2, width, dtype=dtype, device=device) for width in (8, 4))
    keys, values = with_fused_heads(query, key, value)
    assert (keys.shape, values.shape) == ((2, 5, num_heads, 8), (2, 5, num_heads, 4))


def test_keys_with_all_heads_are_those_that_grouped_queries_see() -> None:
    query, key, value = torch.randn(2, 5, 6, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 4)
    repeated = (x.repeat_interleave(3, dim=2) for x in (key, value))
    torch.testing.assert_close(CausalAttention()(query, *repeated), CausalAttention()(query, key, value))
