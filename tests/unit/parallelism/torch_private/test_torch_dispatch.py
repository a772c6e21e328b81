"""count_kernels: what computes is counted, forward and backward, and views are not."""

import torch

from meshwright.parallelism.torch_private.torch_dispatch import count_kernels


def test_views_are_no_kernels_and_backward_counts() -> None:
    x = torch.ones(2, 3, requires_grad=True)

    assert count_kernels(lambda: x.t().unsqueeze(0)) == 0
    assert count_kernels(lambda: torch.mul(x, x)) == 1
    assert count_kernels(lambda: (x * x).sum().backward()) > 3
