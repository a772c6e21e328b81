"""StageInput: one microbatch of a rank, for every stage."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

StageLoss = Callable[..., Tensor]
"""loss(output, targets, *StageInput.loss_arguments): a Loss, or one that takes more than these."""


@dataclass(frozen=True)
class StageInput:
    """One microbatch of a data-parallel and context-parallel rank, for every stage."""

    inputs: Tensor
    targets: Tensor
    context: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's forward: positions and documents."""
    prepare: Callable[[], None] = lambda: None
    """Called before each forward; seeds the random numbers of this microbatch."""
    loss_arguments: tuple[Any, ...] = ()
    """What the loss takes besides output and targets: the pairs of a PreferenceLoss."""
    loss_scale: Tensor | None = None
    """Factor of the loss; None for 1."""
