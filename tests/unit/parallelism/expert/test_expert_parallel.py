"""Which dim of an expert FSDP2 cuts, and in which order rows reach it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.models.expert_rows import reorder
from meshwright.parallelism.expert.expert_parallel import expert_order, expert_shard_dim


@pytest.mark.parametrize(
    ("shape", "expert_dp_shard", "dim"),
    [
        ((8, 6, 4), 1, 0),
        ((8, 6, 4), 4, 0),
        # More ranks than experts, or not a divisor: FSDP2 pads dim 0, and would have ranks without any.
        ((2, 6, 4), 3, 1),
        ((2, 6, 4), 4, 2),
        ((3, 6, 4), 2, 1),
        # Nothing divides: dim 0 is the one that FSDP2 pads.
        ((3, 5, 7), 2, 0),
    ],
)
def test_the_dim_that_divides_evenly_is_cut(shape: tuple[int, ...], expert_dp_shard: int, dim: int) -> None:
    assert expert_shard_dim(nn.Parameter(torch.empty(shape)), expert_dp_shard) == dim


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_are_ordered_by_expert_and_within_it_by_source(counts: list[list[int]]) -> None:
    counts_PL = torch.tensor(counts)
    labels = [(expert, source) for source, row in enumerate(counts) for expert, n in enumerate(row) for _ in range(n)]
    order_Q = expert_order(counts_PL, len(labels))
    assert [labels[place] for place in order_Q] == sorted(labels)
    rows_QD = torch.arange(len(labels), dtype=torch.float64)[:, None].requires_grad_()
    there = reorder(rows_QD, order_Q, order_Q.argsort())
    back = reorder(there, order_Q.argsort(), order_Q)
    assert torch.equal(back, rows_QD)
    (there[:, 0] * torch.arange(len(labels))).sum().backward()
    assert rows_QD.grad is not None
    assert torch.equal(rows_QD.grad[order_Q, 0], torch.arange(len(labels), dtype=torch.float64))
