"""What must hold of a step's numbers, and the errors and advice where it does not."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.errors import ConfigError, NonFiniteError, UnsupportedError
from meshwright.parallelism.exact_sums import GRADIENT_LIMIT_BITS, LOSS_LIMIT_BITS
from meshwright.spec.job.job import Job
from meshwright.units import first_of

ADVICE = "lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or look at the data of this step"
EXACT_ADVICE = (
    f"; with train.exact_elastic a gradient of {2**GRADIENT_LIMIT_BITS} or more in one microbatch, or a loss of "
    f"{2**LOSS_LIMIT_BITS}, counts as infinite: scale the loss down, or set it to false"
)
SKIP_ADVICE = '; guards.not_finite = "skip" skips the updates of such steps'
SKIPPED = "so the optimizer step was skipped and the last checkpoint is unchanged"
UPDATED = "and backward updated parameters all the same (optimizer.in_backward): resume from the last checkpoint"


def require_finite(
    step: int, loss: float, grad_norm: float, advice: Callable[[], str] = lambda: ADVICE, outcome: str = SKIPPED
) -> None:
    """Raise NonFiniteError if the loss or the gradient norm is NaN or infinite.

    Both are equal on every rank, so all ranks stop before the optimizer step, and `advice` may be a collective.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    raise NonFiniteError(f"step {step}: loss = {loss}, gradient norm = {grad_norm}: not finite, {outcome}: {advice()}")


def wrong_losses_text(ranks: Sequence[int], num_ranks: int) -> str:
    """Return the ranks whose loss is not finite, with a colon; "" where it is not of some only."""
    if not 0 < len(ranks) < num_ranks:
        return ""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {first_of([*map(str, ranks)])}"
    return f"only the loss of {which} is not finite: "


def require_unchanged(before: Mapping[str, Tensor], after: Mapping[str, Tensor], job: Job) -> None:
    """Raise UnsupportedError for a buffer that forward changed, by the samples of one rank."""
    if changed := [name for name, buffer in before.items() if not torch.equal(buffer, after[name])]:
        key = "train.exact_elastic" if job.train.exact_elastic else "replicas.independent"
        raise UnsupportedError(
            f"the forward of model.source = {job.model.source!r} changes the buffer {first_of(changed)} by the samples "
            f"of one rank, such as running statistics, so it depends on the number of ranks: set {key} to false, or "
            "take a layer that keeps none, such as a layer norm"
        )


def without_gradient(step: int, names: Sequence[str], job: Job) -> ConfigError:
    """Return the error that lists trainable parameters of model.source without a gradient in a step."""
    if step == 1:
        rule = "every trainable parameter must contribute to the loss of the first step"
        remedy = ", or set requires_grad = False on it there"
    elif job.optimizer.in_backward:
        rule, remedy = "backward updates it, on every rank in every step", ", or set optimizer.in_backward to false"
    else:
        rule, remedy = "a block that FSDP2 shards or casts must run on every rank in every step", ""
    return ConfigError(
        f"no gradient in step {step} for {first_of(names)}: {rule}: use it in the forward of model.source = "
        f"{job.model.source!r}, if need be times 0{remedy}"
    )
