"""The simulated accelerator takes the attention kernel that torch takes on CUDA: one test for each of torch's rules."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.tracer.record.attention_kernels import AttentionCall, cuda_kernel

FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
HALF = torch.bfloat16
GROUPED_IN_FLOAT32 = EFFICIENT if torch.torch_version.TorchVersion(torch.__version__) >= (2, 14) else MATH
"""torch 2.14 taught memory-efficient attention to group heads; until then grouped heads in float32 get matmuls."""


def head(heads: int = 4, length: int = 64, width: int = 64, dtype: torch.dtype = HALF, batch: int = 2) -> Tensor:
    return torch.empty(batch, heads, length, width, dtype=dtype, device="meta")


def kernel(*heads: Tensor, **call: Any) -> SDPBackend:
    """Return what is chosen for query, key and value, or for one that stands for all three."""
    return cuda_kernel(AttentionCall(*(heads * 3 if len(heads) == 1 else heads), **call))


@pytest.mark.parametrize(("width", "expected"), [(8, CUDNN), (64, CUDNN), (128, CUDNN), (136, FLASH), (256, FLASH)])
def test_cudnn_takes_heads_up_to_128_wide_and_flash_up_to_256(width: int, expected: SDPBackend) -> None:
    assert kernel(head(width=width)) == expected


def test_a_deterministic_program_gets_flash() -> None:
    with mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=True):
        assert kernel(head()) == FLASH


def test_wider_heads_are_for_the_efficient_kernel() -> None:
    assert kernel(head(width=264)) == EFFICIENT


def test_heads_that_begin_nowhere_near_128_bits_are_for_matmuls() -> None:
    # Flash attention fills up, the efficient kernel does not.
    assert kernel(head(width=36)) == FLASH
    assert kernel(head(width=260)) == MATH
    assert kernel(head(width=36, dtype=torch.float32)) == EFFICIENT
    assert kernel(head(width=34, dtype=torch.float32)) == MATH


def test_values_of_another_width_are_for_cudnn_up_to_128() -> None:
    query, value = head(width=64), head(width=32)
    assert kernel(query, query, value) == CUDNN
    assert kernel(query, value, value) == MATH
    # Those of latent attention, and others that are as wide.
    assert kernel(head(width=192), head(width=192), head(width=128)) == CUDNN
    assert kernel(head(width=192), head(width=192), head(width=64)) == EFFICIENT


def test_flash_and_the_efficient_kernel_drop_out() -> None:
    assert kernel(head(), dropout_p=0.1) == FLASH
    assert kernel(head(dtype=torch.float32), dropout_p=0.1) == EFFICIENT


@pytest.mark.parametrize("dtype", [torch.bool, HALF])
def test_a_mask_is_for_cudnn(dtype: torch.dtype) -> None:
    mask, one = torch.empty(64, 64, dtype=dtype, device="meta"), head(2)
    assert kernel(head(), attn_mask=mask) == CUDNN
    assert kernel(head(), one, one, attn_mask=mask, enable_gqa=True) == CUDNN


def test_a_mask_that_cudnn_does_not_take_is_for_the_efficient_kernel() -> None:
    mask = torch.empty(64, 64, dtype=HALF, device="meta")
    assert kernel(head(width=136), attn_mask=mask) == EFFICIENT
    assert kernel(head(dtype=torch.float32), attn_mask=mask) == EFFICIENT
    assert kernel(head(), attn_mask=mask.requires_grad_()) == EFFICIENT
    assert kernel(head(), attn_mask=torch.empty(4, 64, 64, dtype=HALF, device="meta")) == EFFICIENT


def test_cudnn_drops_sixteenths() -> None:
    mask = torch.empty(64, 64, dtype=HALF, device="meta")
    assert kernel(head(), attn_mask=mask, dropout_p=0.125) == CUDNN
    assert kernel(head(), attn_mask=mask, dropout_p=0.1) == EFFICIENT


def test_a_mask_whose_rows_are_not_in_one_piece_is_for_matmuls() -> None:
    assert kernel(head(), attn_mask=torch.empty(64, 1, dtype=HALF, device="meta").expand(64, 64)) == MATH


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float16, CUDNN), (HALF, CUDNN), (torch.float32, EFFICIENT), (torch.float64, MATH)]
)
def test_cudnn_is_for_16_bits(dtype: torch.dtype, expected: SDPBackend) -> None:
    assert kernel(head(dtype=dtype)) == expected


def test_formats_that_differ_are_for_matmuls() -> None:
    assert kernel(head(), head(), head(dtype=torch.float16)) == MATH


@pytest.mark.parametrize(("dtype", "expected"), [(HALF, CUDNN), (torch.float32, GROUPED_IN_FLOAT32)])
def test_who_groups_heads(dtype: torch.dtype, expected: SDPBackend) -> None:
    query, key = head(8, dtype=dtype), head(2, dtype=dtype)
    assert kernel(query, key, key, enable_gqa=True) == expected
    # Not told that heads are grouped, none does; matmuls then say what is wrong.
    assert kernel(query, key, key) == MATH


def test_heads_that_do_not_divide_are_for_matmuls() -> None:
    assert kernel(head(8), head(3), head(3), enable_gqa=True) == MATH
    assert kernel(head(8), head(4), head(2), enable_gqa=True) == MATH


def test_a_causal_mask_that_is_no_square_is_not_for_flash() -> None:
    query, key = head(length=32), head(length=64)
    assert kernel(query, key, key, is_causal=True) == CUDNN
    wide = head(length=32, width=256), head(length=64, width=256)
    assert kernel(wide[0], wide[1], wide[1]) == FLASH
    assert kernel(wide[0], wide[1], wide[1], is_causal=True) == EFFICIENT


@pytest.mark.parametrize("query", [torch.empty(4, 64, 64, dtype=HALF, device="meta"), head(length=0), head(batch=1)])
def test_what_no_fused_kernel_takes_is_for_matmuls(query: Tensor) -> None:
    other = query if query.dim() == 3 or not query.numel() else head()
    assert kernel(query, other, other) == MATH


def test_heads_whose_numbers_are_apart_are_for_matmuls() -> None:
    assert kernel(head().transpose(-1, -2)) == MATH


def test_kernels_that_the_program_forbids_are_not_taken() -> None:
    with sdpa_kernel([EFFICIENT, MATH]):
        assert kernel(head()) == EFFICIENT
    with sdpa_kernel(MATH):
        assert kernel(head()) == MATH
    with sdpa_kernel(FLASH):
        assert kernel(head()) == FLASH
    with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="No available kernel"):
        kernel(head(dtype=torch.float32))
