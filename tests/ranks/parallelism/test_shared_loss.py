"""The loss of ranks that share vocabulary or sequence is that of the whole, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.contract import next_token_loss
from meshwright.parallelism.losses.loss import counted_share, make_loss
from meshwright.parallelism.mesh import build_meshes
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks

_NUM_TOKENS, _VOCABULARY = 8, 12


def _logits_and_targets(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_BSV = 4 * torch.randn(2, _NUM_TOKENS, _VOCABULARY, generator=generator, dtype=torch.float64)
    targets_BS = torch.randint(0, _VOCABULARY, (2, _NUM_TOKENS), generator=generator)
    # Ranks that share the sequence hold unequal numbers of targets; of two, the second has none at all.
    targets_BS[:, _NUM_TOKENS // 2 :] = -100
    targets_BS[0, 1] = -100
    return logits_BSV.to(dtype), targets_BS


def _on_a_rank(layout: Layout, dtype: torch.dtype) -> tuple[int, int, Tensor, Tensor]:
    """Return this rank's place in the sequence and in the vocabulary, its loss, and the gradient of its logits.

    Both are of the mean over the targets that count.
    """
    meshes = build_meshes(layout, "cpu")
    cp_rank, tp_rank = meshes.rank("cp"), meshes.rank("tp")
    logits_BSV, targets_BS = _logits_and_targets(dtype)
    part = logits_BSV.chunk(layout.cp, 1)[cp_rank].chunk(layout.tp, 2)[tp_rank].contiguous().requires_grad_()
    loss = make_loss(nn.Identity(), meshes)(part, targets_BS.chunk(layout.cp, 1)[cp_rank])
    loss = loss / counted_share([targets_BS], torch.device("cpu")).to(loss.dtype)
    loss.backward()
    assert part.grad is not None
    return cp_rank, tp_rank, loss.detach(), part.grad


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}, {"tp": 4}], ids=str)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_the_mean_over_ranks_is_the_loss(layout: dict[str, int], dtype: torch.dtype, bar: float) -> None:
    logits_BSV, targets_BS = _logits_and_targets(dtype)
    whole_BSV = logits_BSV.requires_grad_()
    expected = next_token_loss(whole_BSV, targets_BS)
    (expected_gradient,) = torch.autograd.grad(expected, whole_BSV)
    wanted = Layout(**layout)
    found = run_ranks(_on_a_rank, wanted.num_ranks, wanted, dtype)
    mean = sum(loss for _, _, loss, _ in found) / len(found)
    torch.testing.assert_close(mean, expected, rtol=min(bar, 1e-6), atol=0)
    for cp_rank, tp_rank, _, gradient in found:
        part = expected_gradient.chunk(wanted.cp, 1)[cp_rank].chunk(wanted.tp, 2)[tp_rank]
        # The trainer divides by the number of ranks that share the sequence.
        torch.testing.assert_close(gradient / wanted.cp, part, rtol=bar, atol=bar / 10)


def test_a_target_beyond_the_vocabulary_does_not_go_unseen() -> None:
    assert run_ranks(_beyond, 2) == [float("inf")] * 2


def _beyond() -> float:
    meshes = build_meshes(Layout(tp=2), "cpu")
    return make_loss(nn.Identity(), meshes)(torch.zeros(1, 2, 6), torch.tensor([[3, 12]])).item()


def test_logits_of_a_share_of_the_sequence_are_refused() -> None:
    assert all("role head" in message for message in run_ranks(_share_of_the_sequence, 2))


def _share_of_the_sequence() -> str:
    meshes = build_meshes(Layout(tp=2), "cpu")
    with pytest.raises(ConfigError) as error:
        make_loss(nn.Identity(), meshes)(torch.zeros(1, 2, 12), torch.zeros(1, 4, dtype=torch.long))
    return str(error.value)
