"""Backends of attention against CausalAttention: those that run on a CPU, and what the others prepare."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from meshwright.errors import UnsupportedError
from meshwright.models.attention.attention_choice import apply_attention_backend
from meshwright.models.attention.causal_attention import CausalAttention
from meshwright.models.attention.flex_attention import FlexAttention, mask_mod
from meshwright.models.attention.sdpa_attention import SdpaAttention
from meshwright.models.attention.varlen_attention import VarlenAttention, document_starts

LENGTH = 13
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3], [4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6]])


class Model(nn.Module):
    def __init__(self, scale: float | None = None, window: int | None = None) -> None:
        super().__init__()
        self.core = CausalAttention(scale, window)


def heads(num_kv_heads: int = 2, value_width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, LENGTH, 4, 8), (2, LENGTH, num_kv_heads, 8), (2, LENGTH, num_kv_heads, value_width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def attended(core: nn.Module, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Return the output, and the gradients of query, key and value."""
    out = core(*tensors, documents)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


@pytest.mark.parametrize("backend", ["math", "flex"])
@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_backends_compute_what_auto_does(backend: str, window: int | None, documents: Tensor | None) -> None:
    tensors, model = heads(value_width=6), Model(0.7, window)
    expected = attended(model.core, tensors, documents)
    apply_attention_backend(model, backend)  # type: ignore[arg-type]
    assert type(model.core) in (FlexAttention, SdpaAttention)
    for found, wanted in zip(attended(model.core, tensors, documents), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_flash_computes_what_auto_does() -> None:
    tensors, model = heads(), Model()
    expected = attended(model.core, tensors, None)
    apply_attention_backend(model, "flash")
    for found, wanted in zip(attended(model.core, tensors, None), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_flex_attention_itself_under_our_mask(window: int | None, documents: Tensor | None) -> None:
    query, key, value = (x.detach().float() for x in heads())
    mask = create_block_mask(mask_mod(documents, window), 2, None, LENGTH, LENGTH, device="cpu")
    query_BNSH, key_BNSH, value_BNSH = (x.transpose(1, 2) for x in (query, key, value))
    found = flex_attention(query_BNSH, key_BNSH, value_BNSH, block_mask=mask, enable_gqa=True)
    assert isinstance(found, Tensor)
    expected = CausalAttention(window=window)(query, key, value, documents)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=0, atol=1e-5)


def test_starts_of_documents_in_a_row() -> None:
    assert document_starts(None, torch.empty(2, LENGTH)).tolist() == [0, 13, 26]
    # Equal numbers on both sides of a sequence's end are two documents.
    joined = torch.zeros(2, LENGTH, dtype=torch.int64)
    assert document_starts(joined, joined).tolist() == [0, 13, 26]
    starts = document_starts(DOCUMENTS, DOCUMENTS)
    assert starts.tolist() == [0, 3, 7, 9, 13, 14, 24, 26]
    assert starts.dtype == torch.int32
    assert document_starts(DOCUMENTS, DOCUMENTS) is starts, "computed once for all layers"


def test_starts_are_kept_no_longer_than_their_documents() -> None:
    documents = DOCUMENTS.clone()
    kept = weakref.ref(document_starts(documents, documents))
    del documents
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_a_backend_without_sinks_says_so(backend: str) -> None:
    model = Model()
    apply_attention_backend(model, backend)  # type: ignore[arg-type]
    assert type(model.core) in (FlexAttention, VarlenAttention)
    with pytest.raises(UnsupportedError, match=f'sinks is not computed by layout.attention_backend = "{backend}"'):
        model.core(*heads(), None, torch.zeros(4))


def test_a_model_that_attends_by_itself_is_refused() -> None:
    with pytest.raises(UnsupportedError, match='"math": Linear computes attention by itself'):
        apply_attention_backend(nn.Linear(2, 2), "math")
