"""UpdateInBackward: each parameter updated in backward, as soon as FSDP2 has reduced its gradient.

A step then keeps the gradients of one FSDP2 unit at a time, where it would else keep those of all parameters: a float32
gradient is a quarter of what a sharded parameter takes with AdamW. It is exact, to the bit, where a gradient is final
once it is reduced: one microbatch, no clipping, no pipeline (spec/job/rules/optimizer_rules.py). Gradients that are
summed over more ranks after backward, those of parameters that tp replicates, are kept until then, then updated.

A loss that is not finite is found after the update: the run ends, and resumes from its last checkpoint.
"""

import torch
from torch import Tensor, nn

from meshwright.parallelism.gradients import Gradients
from meshwright.trainer.optimizer.optimizer import ModelOptimizer


class UpdateInBackward:
    """Hooks on the parameters that backward updates."""

    def __init__(self, gradients: Gradients, optimizer: ModelOptimizer) -> None:
        self._gradients, self._optimizer = gradients, optimizer
        self.parameters = gradients.final_in_backward()
        self._updated: set[nn.Parameter] = set()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def take_updated(self) -> set[nn.Parameter]:
        """Return the parameters that were updated since the last call."""
        updated, self._updated = self._updated, set()
        return updated

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._gradients.finish_one(parameter)
        self._optimizer.step_of(parameter)
        parameter.grad = None
        self._updated.add(parameter)
