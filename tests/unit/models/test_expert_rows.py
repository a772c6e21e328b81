"""Rows of experts: the numbers of autograd's own backward, with less kept for it."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.models.expert_rows import collect, spread, swiglu
from meshwright.models.moe import Experts

PLACES = torch.tensor([0, 1, 4, 5, 6, 8])
NUM_PADDED = 12


def rows(num_rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_swiglu_is_autograds_own_to_the_bit() -> None:
    gate_RF, up_RF, direction_RF = rows(6, 8, 0), rows(6, 8, 1), rows(6, 8, 2)
    ours_RF, theirs_RF = swiglu(gate_RF, up_RF), F.silu(gate_RF) * up_RF
    assert torch.equal(ours_RF, theirs_RF)
    ours, theirs = (torch.autograd.grad(one, (gate_RF, up_RF), direction_RF) for one in (ours_RF, theirs_RF))
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))


def test_rows_are_spread_among_zeros_and_collected_again() -> None:
    rows_RD, direction_PD = rows(len(PLACES), 4, 0), rows(NUM_PADDED, 4, 1).detach()
    padded_PD = spread(rows_RD, PLACES, NUM_PADDED)
    expected_PD = torch.zeros(NUM_PADDED, 4)
    expected_PD[PLACES] = rows_RD.detach()
    assert torch.equal(padded_PD, expected_PD)
    assert torch.equal(collect(padded_PD, PLACES), rows_RD)
    (gradient_RD,) = torch.autograd.grad(padded_PD, rows_RD, direction_PD)
    assert torch.equal(gradient_RD, direction_PD[PLACES])
    source_PD = direction_PD.clone().requires_grad_()
    (gradient_PD,) = torch.autograd.grad(collect(source_PD, PLACES), source_PD, rows_RD.detach())
    assert torch.equal(gradient_PD, expected_PD)


def test_experts_keep_their_padded_input_and_three_intermediates() -> None:
    experts, saved = Experts(2, 4, 8), {}
    experts.alignment = 8

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        experts(rows(10, 4, 0), torch.tensor([7, 3]))
    kept = [tuple(tensor.shape) for tensor in saved.values() if tensor.dtype == torch.float32 and tensor.dim() == 2]
    num_padded = 10 + 2 * 7
    assert sorted(kept) == [(num_padded, 4), *[(num_padded, 8)] * 3]
