"""A part of attention, and parts put together, against the whole written out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.parallelism.context.ring_attention import PartialAttention, merge_into
from meshwright.parallelism.torch_private.torch_attention import Heads

B, S, N, K = 2, 12, 4, 2


def heads(num_keys: int = S, width: int = 8, value_width: int = 8, dtype: torch.dtype = torch.float64) -> Heads:
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, S, N, width), (B, num_keys, K, width), (B, num_keys, K, value_width))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return query, key, value


def written_out(heads: Heads, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attended_BSNW and logsumexp_BSN by the definition; `visible` is what each query sees, [B, S, T]."""
    query_BNSH, key_BNTH, value_BNTW = (x.repeat_interleave(N // x.shape[2], 2).transpose(1, 2) for x in heads)
    scores_BNST = (query_BNSH @ key_BNTH.mT * scale).masked_fill(~visible[:, None], -torch.inf)
    attended_BNSW = scores_BNST.softmax(-1).nan_to_num() @ value_BNTW
    return attended_BNSW.transpose(1, 2), scores_BNST.logsumexp(-1).transpose(1, 2)


def as_documents(visible_to_all: bool) -> tuple[Tensor, Tensor]:
    """Return documents of queries and keys: one document, or none in common in the first row."""
    documents = torch.zeros(B, S, dtype=torch.int64)
    others = documents.clone()
    if not visible_to_all:
        others[0] += 7
    return documents, others


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize(("width", "value_width"), [(8, 8), (8, 5), (5, 8)])
def test_a_part_is_a_softmax_of_its_own(is_causal: bool, by_kernel: bool, width: int, value_width: int) -> None:
    given = heads(width=width, value_width=value_width)
    pair = PartialAttention(given, 0.3, is_causal, None if by_kernel else as_documents(visible_to_all=True))
    visible = torch.ones(S, S, dtype=torch.bool).tril(0 if is_causal else S)
    for one, other in zip(pair.attend(), written_out(given, visible.expand(B, S, S), 0.3), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_a_query_that_sees_no_key_gets_nothing_and_gives_nothing() -> None:
    pair = PartialAttention(heads(), 0.3, False, as_documents(visible_to_all=False))
    attended, logsumexp = pair.attend()
    assert attended[0].abs().max() == 0
    assert (logsumexp[0] == -torch.inf).all()
    assert torch.isfinite(attended).all()
    assert torch.isfinite(logsumexp[1]).all()
    whole = (torch.ones_like(attended), torch.zeros_like(logsumexp))
    for gradient in pair.backward(torch.ones_like(attended), whole):
        assert gradient[0].abs().max() == 0
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("value_width", [8, 5])
def test_parts_and_their_gradients_add_up_to_the_whole(by_kernel: bool, value_width: int) -> None:
    own, more = heads(value_width=value_width), heads(num_keys=7, value_width=value_width)
    documents = None if by_kernel else as_documents(visible_to_all=True)
    pairs = [
        PartialAttention(own, 0.3, True, documents),
        PartialAttention(
            (own[0], *more[1:]), 0.3, False, None if documents is None else (documents[0], documents[1][:, :7])
        ),
    ]
    whole = pairs[0].attend()
    merge_into(whole, pairs[1].attend())
    visible = torch.cat((torch.ones(S, S, dtype=torch.bool).tril(), torch.ones(S, 7, dtype=torch.bool)), dim=1)
    leaves = [x.clone().requires_grad_() for x in (*own, *more[1:])]
    joined = (leaves[0], torch.cat((leaves[1], leaves[3]), dim=1), torch.cat((leaves[2], leaves[4]), dim=1))
    expected, expected_logsumexp = written_out(joined, visible.expand(B, S, S + 7), 0.3)
    torch.testing.assert_close(whole, (expected.detach(), expected_logsumexp.detach()), rtol=0, atol=1e-14)

    gradient = torch.linspace(-1, 1, whole[0].numel(), dtype=torch.float64).view_as(whole[0])
    expected.backward(gradient)
    (of_query, *of_own), (more_of_query, *of_more) = (pair.backward(gradient, whole) for pair in pairs)
    for given, leaf in zip((of_query + more_of_query, *of_own, *of_more), leaves, strict=True):
        torch.testing.assert_close(given, leaf.grad, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_queries_in_blocks_get_what_they_get_at_once() -> None:
    # 2^25 scores: too many to be held at once.
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1024, 32, 2, generator=generator) for _ in range(3))
    documents = torch.arange(1024)[None] // 300
    pair = PartialAttention((query, key, value), 0.5, True, (documents, documents))
    mask = (documents[:, :, None] == documents[:, None, :]) & torch.ones(1024, 1024, dtype=torch.bool).tril()
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), attn_mask=mask[None], scale=0.5)
    expected = expected.transpose(1, 2)
    whole = pair.attend()
    torch.testing.assert_close(whole[0], expected.detach(), rtol=0, atol=1e-5)
    gradient = torch.randn(expected.shape, generator=generator)
    expected.backward(gradient)
    for given, leaf in zip(pair.backward(gradient, whole), leaves, strict=True):
        torch.testing.assert_close(given, leaf.grad, rtol=1e-4, atol=1e-4)


def test_bfloat16_parts_are_merged_in_float32() -> None:
    pair = PartialAttention(heads(dtype=torch.bfloat16), 0.3, False)
    attended, logsumexp = pair.attend()
    merged = attended.float(), logsumexp.float()
    merge_into(merged, replace(pair, is_causal=True).attend())
    assert {x.dtype for x in merged} == {torch.float32}
