"""Attention by rows is one operator on an accelerator, which does what the host's operators do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallelism.context.blockwise_attention import blockwise_attention, blockwise_attention_backward
from meshwright.parallelism.context.ring_attention import PartialAttention
from meshwright.parallelism.torch_private.torch_attention import Heads

B, S, N, K, H = 2, 12, 4, 2, 8
operators = torch.ops.meshwright


class Seen(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def heads(positions: int = S, dtype: torch.dtype = torch.float32) -> Heads:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(B, positions, n, H, generator=generator).to(dtype) for n in (N, K, K))
    return query, key, value


def documents() -> tuple[Tensor, Tensor]:
    numbers = (torch.arange(S) // 5).expand(B, S)
    return numbers, numbers


@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_the_same_arithmetic(has_documents: bool, dtype: torch.dtype) -> None:
    given, hidden = heads(dtype=dtype), documents() if has_documents else None
    whole = blockwise_attention(given, hidden, True, 0.3)
    rest = (list(hidden or ()), True, 0.3)
    torch.testing.assert_close(operators.attention_by_rows(list(given), *rest), whole, rtol=0, atol=0)
    gradient = torch.linspace(-1, 1, whole[0].numel()).view_as(whole[0])
    gradients = blockwise_attention_backward(gradient, given, whole, hidden, True, 0.3)
    by_operator = operators.attention_by_rows_backward(list(given), gradient, list(whole), *rest)
    torch.testing.assert_close(by_operator, gradients, rtol=0, atol=0)
    for name, args in (
        ("attention_by_rows", (list(given), *rest)),
        ("attention_by_rows_backward", (list(given), gradient, list(whole), *rest)),
    ):
        operator = getattr(operators, name).default
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def test_a_long_ring_of_documents_is_two_operators_in_a_trace() -> None:
    # 2^31 scores: 128 blocks.
    given = tuple(x.to("meta") for x in heads(16_384, torch.bfloat16))
    numbers = torch.zeros(B, 16_384, dtype=torch.int64, device="meta")
    pair = PartialAttention((given[0], given[1], given[2]), 0.3, True, (numbers, numbers))
    with Seen() as seen:
        whole = pair.attend()
        gradients = pair.backward(whole[0], whole)
    assert [name for name in seen.names if "attention" in name] == ["attention_by_rows", "attention_by_rows_backward"]
    assert len(seen.names) < 20
    assert [x.shape for x in gradients] == [x.shape for x in given]
    assert {x.dtype for x in (*whole, *gradients)} == {torch.float32}
