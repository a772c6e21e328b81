"""Guards that stop a run before an invalid update reaches the weights."""

import math
from collections.abc import Iterable

from torch import nn

from meshwright.errors import MeshwrightError, NonFiniteError


def require_finite(step: int, loss: float, grad_norm: float) -> None:
    """Raise NonFiniteError if the loss or the gradient norm is NaN or infinite.

    Both are equal on every rank, so all ranks stop before the optimizer step.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    raise NonFiniteError(
        f"step {step}: loss = {loss}, gradient norm = {grad_norm}: not finite, so the optimizer step was skipped "
        "and the last checkpoint is unchanged: lower optimizer.learning_rate, lengthen optimizer.warmup_steps, "
        "or look at the data of this step"
    )


def require_all_gradients(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise MeshwrightError that lists trainable parameters without a gradient after the first backward."""
    missing = [name for name, parameter in named_parameters if parameter.requires_grad and parameter.grad is None]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise MeshwrightError(
            f"no gradient after the first backward for {shown}: every trainable parameter must contribute to the "
            "loss: use it in the model's forward, or set requires_grad = False on it in the model"
        )
