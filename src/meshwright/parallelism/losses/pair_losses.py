"""pair_losses: the loss of each pair of answers, one preferred, from log-ratios of the model to the reference.

With r and s the log-ratios of the chosen and of the rejected answer, each the sum over an answer's tokens of
log p - log q (p the model, q the reference), x = beta (r - s), and e dpo.label_smoothing:

    sigmoid   -(1 - e) log sigmoid(x) - e log sigmoid(-x)
    robust    (-(1 - e) log sigmoid(x) + e log sigmoid(-x)) / (1 - 2 e)
    hinge     max(0, 1 - x)
    ipo       (r - s - 1 / (2 beta))^2

sigmoid is DPO (Rafailov et al., arXiv:2305.18290, equation 7), with e > 0 conservative DPO (Mitchell, "A note on DPO
with noisy preferences", 2023, equation 3); robust is that of Chowdhury et al., arXiv:2403.00409; hinge is SLiC-HF's
(Zhao et al., arXiv:2305.10425) of ratios to a reference (RSO, Liu et al., arXiv:2309.06657); ipo is equation 17 of Azar
et al., arXiv:2310.12036.

For ipo the log-ratios are means over an answer's tokens, as in TRL: as sums, their square would grow with the answers.
"""

import torch.nn.functional as F
from torch import Tensor

from meshwright.spec.job.dpo_section import DpoSection


def pair_losses(dpo: DpoSection, log_ratios_BP2: Tensor) -> Tensor:
    """Return losses_BP from the log-ratios of the chosen and the rejected answers: means for ipo, sums else."""
    differences_BP = log_ratios_BP2[..., 0] - log_ratios_BP2[..., 1]
    if dpo.loss == "ipo":
        return (differences_BP - 1 / (2 * dpo.beta)).square()
    margins_BP = dpo.beta * differences_BP
    if dpo.loss == "hinge":
        return F.relu(1 - margins_BP)
    swapped = dpo.label_smoothing
    as_labelled_BP = -(1 - swapped) * F.logsigmoid(margins_BP)
    as_swapped_BP = -swapped * F.logsigmoid(-margins_BP)
    if dpo.loss == "robust":
        return (as_labelled_BP - as_swapped_BP) / (1 - 2 * swapped)
    return as_labelled_BP + as_swapped_BP
