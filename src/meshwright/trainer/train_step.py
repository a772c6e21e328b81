"""One optimizer step: microbatches forward and backward, clip, guard, update."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from meshwright.data.loader import Microbatch
from meshwright.fault_tolerance.guards import require_all_gradients, require_finite, require_scalar
from meshwright.parallelism.buffers import share_buffers
from meshwright.parallelism.fully_sharded import reshard_model
from meshwright.parallelism.gradients import clip_gradients
from meshwright.parallelism.torch_compat import canonical_parameters
from meshwright.spec.job import Job
from meshwright.trainer.learning_rate import learning_rate
from meshwright.trainer.ranks import Ranks


@dataclass(frozen=True)
class StepResult:
    """What a step says of itself; equal on every rank."""

    loss: float
    grad_norm: float
    learning_rate: float


@dataclass
class TrainStep:
    """Callable: runs one optimizer step on this rank's microbatches of it."""

    job: Job
    ranks: Ranks
    model: nn.Module
    optimizer: AdamW
    loss: Callable[[Tensor, Tensor], Tensor]
    checked_gradients: bool = False

    def __call__(self, step: int, microbatches: Sequence[Microbatch]) -> StepResult:
        """Return the mean loss over the global batch of `step` after updating the parameters; a collective."""
        rate = learning_rate(step, self.job.train.steps, self.job.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        local_loss = self._accumulate_gradients(step, microbatches)
        if not self.checked_gradients:
            require_all_gradients(canonical_parameters(self.model))
            self.checked_gradients = True
        grad_norm = clip_gradients(self.model.parameters(), self.job.optimizer.max_grad_norm)
        loss = self.ranks.mean(local_loss)
        result = StepResult(loss.item(), grad_norm.item(), rate)
        require_finite(step, result.loss, result.grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        share_buffers(self.model)
        return result

    def _accumulate_gradients(self, step: int, microbatches: Sequence[Microbatch]) -> Tensor:
        total = torch.zeros((), device=self.ranks.device)
        for number, microbatch in enumerate(microbatches, start=1):
            # Gradients travel once, after the last microbatch.
            self.model.set_requires_gradient_sync(number == len(microbatches))  # type: ignore[operator]
            seed_everything(self.job.train.seed, step, microbatch.first_slot)
            loss = self._forward(microbatch) / len(microbatches)
            loss.backward()
            total += loss.detach()
        return total

    def _forward(self, microbatch: Microbatch) -> Tensor:
        device = self.ranks.device
        inputs = microbatch.inputs.to(device, non_blocking=True)
        targets = microbatch.targets.to(device, non_blocking=True)
        loss = self.loss(self.model(inputs), targets)
        require_scalar(loss)
        return loss

    @torch.no_grad()
    def validate(self, batches: Sequence[Sequence[Microbatch]]) -> float:
        """Return the mean loss over `batches` of microbatches without training on them; a collective."""
        self.model.eval()
        total = torch.zeros((), device=self.ranks.device)
        for microbatches in batches:
            for microbatch in microbatches:
                total += self._forward(microbatch) / (len(microbatches) * len(batches))
        # A checkpoint may be next, and it saves shards.
        reshard_model(self.model)
        self.model.train()
        return self.ranks.mean(total).item()


def seed_everything(seed: int, step: int, first_slot: int) -> None:
    """Seed every generator from the microbatch's place in the run, so that no generator has to be saved.

    Dropout then depends on (seed, step, slot): resuming is exact, and other ranks on the same slot draw the same.
    """
    mixed = int(np.random.SeedSequence([seed, step, first_slot]).generate_state(1, np.uint64)[0])
    torch.manual_seed(mixed % 2**63)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)
