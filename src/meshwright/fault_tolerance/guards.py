"""Guards that turn silent damage into a stop: each raises before anything wrong is written into the weights."""

import math
from collections.abc import Iterable

from torch import nn

from meshwright.errors import MeshwrightError, NonFiniteError


def require_finite(step: int, loss: float, grad_norm: float) -> None:
    """Raise NonFiniteError when the loss or the gradient norm is NaN or infinite.

    Both are the same number on every rank, so every rank stops together, before the optimizer step.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    raise NonFiniteError(
        f"step {step}: loss = {loss}, gradient norm = {grad_norm}: not finite, so the optimizer step was not taken "
        "and the last checkpoint is untouched: lower optimizer.learning_rate, lengthen optimizer.warmup_steps, "
        "or look at the data of this step"
    )


def require_all_gradients(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise MeshwrightError naming the trainable parameters that the first backward did not reach.

    A parameter without a gradient never trains and nothing else would say so.
    """
    missing = [name for name, parameter in named_parameters if parameter.requires_grad and parameter.grad is None]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise MeshwrightError(
            f"no gradient after the first backward for {shown}: every trainable parameter must be used by the loss: "
            "use it in the model's forward, or set requires_grad = False on it in the model"
        )
