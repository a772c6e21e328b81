"""Attention backends on a CUDA device against float64 on the CPU: outputs, gradients, and the kernels that run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from meshwright.models.attention.attention_choice import apply_attention_backend
from meshwright.models.attention.causal_attention import CausalAttention
from meshwright.spec.layout.attention_backend import AttentionBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
    # Dynamo and the profiler of torch 2.11 warn of what they do themselves.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]
LENGTH = 384
BACKENDS: tuple[AttentionBackend, ...] = ("flash", "cudnn", "efficient", "math", "flex", "varlen")
KERNELS = {"flash": "flash", "cudnn": "cudnn", "efficient": "fmha", "flex": "flex_attention", "varlen": "flash"}
"""A part of the name of the kernel that each runs, in small letters."""


class Model(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.core = CausalAttention(window=window)


def attended(
    backend: AttentionBackend, heads: list[Tensor], documents: Tensor | None, window: int | None
) -> list[Tensor]:
    """Return the output and the gradients of query, key and value."""
    model = Model(window)
    apply_attention_backend(model, backend)
    leaves = [x.detach().clone().requires_grad_() for x in heads]
    out = model.core(*leaves, documents)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def inputs(width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, LENGTH, 8, width), (2, LENGTH, 2, width), (2, LENGTH, 2, width))
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("has_documents", "window"), [(False, None), (True, None), (False, 100), (True, 100)])
def test_a_backend_equals_float64_of_the_cpu(
    backend: AttentionBackend, width: int, has_documents: bool, window: int | None
) -> None:
    if backend == "flash" and (has_documents or window):
        pytest.skip("flash attention takes no mask")
    documents = torch.arange(LENGTH).expand(2, -1) // 130 if has_documents else None
    here = attended("auto", [x.double() for x in inputs(width)], documents, window)
    on_device = None if documents is None else documents.cuda()
    there = attended(backend, [x.cuda() for x in inputs(width)], on_device, window)
    for one, other in zip(there, here, strict=True):
        error = (one.double().cpu() - other).norm() / other.norm()
        assert error < 2e-2, float(error)


@pytest.mark.parametrize("backend", KERNELS)
def test_the_kernel_that_is_named_runs(backend: AttentionBackend) -> None:
    heads = [x.cuda() for x in inputs(128)]
    attended(backend, heads, None, None)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        attended(backend, heads, None, None)
    names = [event.name.lower() for event in found.events()]
    assert any(KERNELS[backend] in name for name in names), names


def test_auto_takes_cudnn_where_the_cost_model_says_so() -> None:
    if torch.cuda.get_device_capability()[0] != 9 or torch.backends.cudnn.version() <= 91500:
        pytest.skip("torch prefers cuDNN's kernels on Hopper, with a cuDNN above 9.15")
    heads = [x.cuda() for x in inputs(128)]
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        attended("auto", heads, None, None)
    assert any("cudnn" in event.name.lower() for event in found.events())
