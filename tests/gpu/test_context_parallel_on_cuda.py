"""The parts that a ring is made of, on a CUDA device: with its kernels and without, against float64 on the CPU."""

import pytest
import torch

from meshwright.parallelism.context.ring_attention import PartialAttention
from meshwright.parallelism.torch_private.torch_attention import Attended, Heads, has_flash_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (24, 16), (20, 20)])
@pytest.mark.parametrize("has_documents", [False, True])
def test_a_part_equals_that_of_the_cpu(
    dtype: torch.dtype, tolerance: float, is_causal: bool, width: int, value_width: int, has_documents: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 96, 4, width), (2, 96, 2, width), (2, 96, 2, value_width), (2, 96, 4, value_width))
    query, key, value, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    documents = torch.arange(96).expand(2, 96) // 40 if has_documents else None
    here = _attend((query.double(), key.double(), value.double()), gradient.double(), is_causal, documents)
    heads: Heads = (query.cuda(), key.cuda(), value.cuda())
    assert has_flash_kernel(heads, is_causal) == (dtype is torch.bfloat16)
    there = _attend(heads, gradient.cuda(), is_causal, None if documents is None else documents.cuda())
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=tolerance, atol=tolerance)


def _attend(
    heads: Heads, gradient: torch.Tensor, is_causal: bool, documents: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    pair = PartialAttention(heads, 0.2, is_causal, None if documents is None else (documents, documents))
    attended, logsumexp = pair.attend()
    whole: Attended = (attended.to(heads[0].dtype), logsumexp)
    return *whole, *pair.backward(gradient, whole)
