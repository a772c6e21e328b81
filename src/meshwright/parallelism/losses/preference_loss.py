"""PreferenceLoss: the loss of pairs of answers, one preferred to the other (dpo.loss; formulas in pair_losses.py).

Documents 2 i and 2 i + 1 of a row are the two answers of its pair i; what follows them is padding.

Shapes: B rows, S positions of this rank's shard of a sequence, P pairs of a row at most, V this rank's shard of the
vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.parallelism.collectives import all_reduce_sum
from meshwright.parallelism.losses.loss import NextTokenLoss
from meshwright.parallelism.losses.pair_losses import pair_losses
from meshwright.parallelism.mesh import Meshes
from meshwright.spec.job.dpo_section import DpoSection

_REWARDS = ("chosen", "rejected", "margin", "accuracy")


@dataclass(frozen=True)
class Pairs:
    """What the loss of a microbatch needs besides logits and targets."""

    documents_BS: Tensor
    reference_BP2: Tensor
    """log q of the chosen and the rejected answer of each pair, in float64."""
    is_pair_BP: Tensor
    """Which of them there are."""


class AnswerScores:
    """Callable: log-probabilities of both answers of each pair, summed over the tokens of all cp ranks."""

    def __init__(self, token_loss: NextTokenLoss, cp_group: dist.ProcessGroup) -> None:
        self._token_loss, self._cp_group = token_loss, cp_group

    def __call__(self, output_BSV: Tensor, targets_BS: Tensor, pairs: Pairs) -> Tensor:
        """Return them as float64 [B, P, 2], of this model; equal on all tp and cp ranks."""
        log_probs_BS = -self._token_loss.of_tokens(output_BSV, targets_BS).view_as(targets_BS).double()
        return self._of_answers(log_probs_BS, pairs)

    def num_tokens(self, targets_BS: Tensor, pairs: Pairs) -> Tensor:
        """Return the number of targets of both answers of each pair, on all cp ranks: float64 [B, P, 2]."""
        return self._of_answers((targets_BS != -100).double(), pairs)

    def _of_answers(self, of_tokens_BS: Tensor, pairs: Pairs) -> Tensor:
        """Return the sums over the tokens of each answer, [B, P, 2]."""
        rows, num_pairs, _ = pairs.reference_BP2.shape
        numbers_D = torch.arange(2 * num_pairs, device=of_tokens_BS.device)
        # A sum over a mask: adding at indices has no order on a GPU.
        is_of_BDS = pairs.documents_BS[:, None, :] == numbers_D[None, :, None]
        sums_BD = torch.where(is_of_BDS, of_tokens_BS[:, None, :], 0.0).sum(-1)
        if self._cp_group.size() > 1:
            sums_BD = _SumOverRanks.apply(sums_BD, self._cp_group)  # type: ignore[no-untyped-call]
        return sums_BD.view(rows, num_pairs, 2)


class PreferenceLoss(NextTokenLoss):
    """Callable: the loss summed over a microbatch's pairs, divided by its rows; also keeps the rewards of pairs.

    Multiplied by `rows_per_pair` of the step, its mean over microbatches is that over the pairs of the global batch.
    A reward is beta (log p - log q) of an answer, whatever the loss is.
    """

    def __init__(self, dpo: DpoSection, meshes: Meshes, token_loss: NextTokenLoss) -> None:
        super().__init__(meshes.group("tp"))
        self.scores = AnswerScores(token_loss, meshes.group("cp"))
        self._dpo = dpo
        self._totals = torch.zeros(4, dtype=torch.float64, device=meshes.device_type)

    def begin(self) -> None:
        """Forget the rewards of earlier pairs."""
        self._totals.zero_()

    def __call__(self, output_BSV: Tensor, targets_BS: Tensor, pairs: Pairs | None = None) -> Tensor:
        """Return the loss of this rank's microbatch; the same on all tp and cp ranks."""
        assert pairs is not None
        log_ratios_BP2 = self.scores(output_BSV, targets_BS, pairs) - pairs.reference_BP2
        self._count(self._dpo.beta * log_ratios_BP2.detach(), pairs.is_pair_BP)
        if self._dpo.loss == "ipo":
            # Of padding there are none.
            log_ratios_BP2 = log_ratios_BP2 / self.scores.num_tokens(targets_BS, pairs).clamp(min=1)
        losses_BP = pair_losses(self._dpo, log_ratios_BP2)
        return torch.where(pairs.is_pair_BP, losses_BP, 0.0).sum() / targets_BS.shape[0]

    def _count(self, rewards_BP2: Tensor, is_pair_BP: Tensor) -> None:
        chosen, rejected = torch.where(is_pair_BP[..., None], rewards_BP2, 0.0).sum((0, 1))
        is_right_BP = (rewards_BP2[..., 0] > rewards_BP2[..., 1]) & is_pair_BP
        self._totals += torch.stack((chosen, rejected, is_right_BP.sum().double(), is_pair_BP.sum().double()))

    def metrics(self, sum_outside: Callable[[Tensor], object] | None = None) -> dict[str, float]:
        """Return the mean rewards of the pairs since `begin`, their margin, and the share that is ranked right.

        A collective of all ranks, and of those that `sum_outside` adds in place. Each pair is counted by as many ranks
        as any other, so that means are of pairs.
        """
        totals = self._totals.clone()
        if sum_outside is not None:
            sum_outside(totals)
        dist.all_reduce(totals)
        chosen, rejected, num_right, num_pairs = totals
        # Divided as tensors: where a step is traced, no other rank adds the pairs of a pipeline's last stage.
        means = (torch.stack((chosen, rejected, chosen - rejected, num_right)) / num_pairs).tolist()
        return {f"rewards/{name}": mean for name, mean in zip(_REWARDS, means, strict=True)}


def rows_per_pair(is_pair: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return how many rows there are for each pair of a step, over all ranks: a float64 scalar; a collective.

    `is_pair` are the is_pair_BP of this rank's microbatches, on the CPU.
    """
    counts = [(one.shape[0], int(one.sum())) for one in is_pair]
    totals = torch.tensor(counts, dtype=torch.float64).sum(0).to(device)
    dist.all_reduce(totals)
    return totals[0] / totals[1]


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, each of which computes the same loss from it.

    The loss of a step is the mean over these ranks, so a rank's gradient is of the sum of their losses.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.num_ranks = group.size()
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.num_ranks, None
