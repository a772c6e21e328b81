"""TokenAccuracy: the share of targets that the model ranks first, counted from the logits that a loss has anyway.

A target counts where the next-token loss counts it (not -100), and is right where it is the argmax of its logits, the
first one of equal logits, as torch.argmax and TRL's `mean_token_accuracy` have it.

Shapes: T tokens, V this rank's shard of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.parallelism.collectives import all_gather_dim
from meshwright.parallelism.mesh import Meshes


class TokenAccuracy:
    """Counts of the targets since `begin`, kept on the device: nothing waits for them before `share`."""

    def __init__(self, meshes: Meshes) -> None:
        self._tp_group = meshes.group("tp")
        # One tensor for good: a CUDA graph adds to it at this address.
        self._right_and_all = torch.zeros(2, dtype=torch.float64, device=meshes.device_type)

    def begin(self) -> None:
        """Forget the targets counted so far."""
        self._right_and_all.zero_()

    @torch.no_grad()
    def count(self, logits_TV: Tensor, target_T: Tensor) -> None:
        """Count the targets of this rank's shard of the sequence; a collective of the tp ranks."""
        is_target_T = target_T != -100
        is_right_T = (_first_largest(logits_TV.detach(), self._tp_group) == target_T) & is_target_T
        self._right_and_all += torch.stack((is_right_T.sum(), is_target_T.sum()))

    def counting(self, cross_entropy: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `cross_entropy`(logits, targets, ...) that counts first: it may overwrite the logits."""

        def counted(logits_TV: Tensor, target_T: Tensor, *further: Any) -> Tensor:
            self.count(logits_TV, target_T)
            return cross_entropy(logits_TV, target_T, *further)

        return counted

    def share(self, sum_outside: Callable[[Tensor], object] | None = None) -> float:
        """Return the share of right targets, NaN without a target; a collective of all ranks.

        `sum_outside` adds in place what ranks outside of this process group have counted. Each target is counted by as
        many ranks as any other.
        """
        totals = self._right_and_all.clone()
        if sum_outside is not None:
            sum_outside(totals)
        dist.all_reduce(totals)
        num_right, num_targets = totals.tolist()
        return num_right / num_targets if num_targets else float("nan")


def _first_largest(logits_TV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens_T with the largest logits over the vocabulary, whose equal shards `group` holds in order."""
    # Not argmax, which takes four times as long for bfloat16 on a CPU (torch 2.13).
    largest_T, token_T = logits_TV.max(1)
    if group.size() == 1:
        return token_T
    token_T = token_T + group.rank() * logits_TV.shape[1]
    # Float64 holds both exactly.
    largest_RT, token_RT = all_gather_dim(torch.stack((largest_T.double(), token_T.double()))[None], 0, group).unbind(1)
    return token_RT.gather(0, largest_RT.argmax(0)[None])[0].long()
