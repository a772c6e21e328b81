"""One optimizer step: microbatches forward and backward, clip, guard, update."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.data.loader import Microbatch
from meshwright.data.packing.pair_dataset import NO_PAIR
from meshwright.fault_tolerance.corruption.replica_copies import ReplicaCopies
from meshwright.fault_tolerance.corruption.replica_guard import ReplicaGuard
from meshwright.fault_tolerance.replicas.replica_group import ReplicaGroup
from meshwright.fault_tolerance.step_guard import Decision, StepGuard
from meshwright.parallelism.context.context_parallel import sequence_indices
from meshwright.parallelism.data.fully_sharded import reshard_model
from meshwright.parallelism.data.materialize import share_buffers, statistics_of
from meshwright.parallelism.data.missing_gradients import unused_everywhere
from meshwright.parallelism.float8.float8_gather import Float8Gathers
from meshwright.parallelism.gradients import Gradients
from meshwright.parallelism.losses.loss import NextTokenLoss, RowLosses, counted_share
from meshwright.parallelism.losses.preference_loss import Pairs, PreferenceLoss, rows_per_pair
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.pipeline import Observe, Pipeline, ignore
from meshwright.parallelism.pipeline.stage_input import StageInput
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box, persistent_buffers
from meshwright.spec.job.job import Job
from meshwright.trainer.optimizer.optimizer import ModelOptimizer, learning_rate, optimizer_state
from meshwright.trainer.optimizer.update_in_backward import UpdateInBackward
from meshwright.trainer.step.expert_load import ExpertLoad
from meshwright.trainer.step.outer_sync import OuterSync
from meshwright.trainer.step.step_requirements import (
    ADVICE,
    EXACT_ADVICE,
    SKIP_ADVICE,
    SKIPPED,
    UPDATED,
    require_finite,
    require_unchanged,
    without_gradient,
    wrong_losses_text,
)


@dataclass(frozen=True)
class StepResult:
    """Metrics of a step; equal on every rank."""

    loss: float
    grad_norm: float
    learning_rate: float
    experts: dict[str, float] = field(default_factory=dict)
    """Metrics of ExpertLoad; empty without experts."""
    loss_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of NextTokenLoss and PreferenceLoss: token accuracy, rewards; empty where they count nothing."""
    decision: Decision = "take"
    """What [guards] made of it."""


class TrainStep:
    """Callable: one optimizer step on this rank's microbatches."""

    may_ignore_targets = False
    """Whether the data may hold targets of -100, which the next-token loss ignores."""

    def __init__(self, job: Job, model: Stages, meshes: Meshes, optimizer: ModelOptimizer, pipeline: Pipeline) -> None:
        self.job, self.model, self.meshes, self.optimizer, self.pipeline = job, model, meshes, optimizer, pipeline
        self.gradients = Gradients(model, meshes, leaves_scale=meshes.layout.compile_optimizer)
        self.float8_gathers = Float8Gathers(model, meshes)
        self.expert_load = ExpertLoad(model, meshes)
        self.in_backward = UpdateInBackward(self.gradients, optimizer) if job.optimizer.in_backward else None
        model.updates_in_backward = self.in_backward is not None
        self.positions_S = self._own_positions()
        self.observe_gradients: Callable[[nn.Module], None] | None = None
        """Called with the model once per step, with the gradients of the mean loss before clipping."""
        self.replicas: ReplicaGroup | None = None
        """Independent replicas that share every step's batch; None where all of it is on these ranks."""
        self.outer_sync: OuterSync | None = None
        """What independent replicas do that train for several steps by themselves, each on its part of the batch."""
        self.reference: Tensor | None = None
        """What the reference gives both answers of each pair: float64 [pairs, 2] on the CPU; zeros until it is set."""
        self.guard = StepGuard(job.guards) if job.guards.skips_any else None
        self.replica_guard = self._replica_guard() if job.guards.checks_numbers else None
        self._has_checked_gradients = False
        self._observe: Observe = ignore
        self.before_update: Callable[[], None] | None = None
        """Called before parameters change, such as to wait for a snapshot of them."""

    @property
    def epoch(self) -> int:
        """Return the epoch of the quorum of independent replicas that the step is done with; 0 without."""
        return 0 if self.replicas is None or self.replicas.quorum is None else self.replicas.quorum.epoch

    def report_to(self, observe: Observe) -> None:
        """Call `observe` with each pipeline action and each later phase of a step."""
        self._observe = self.pipeline.observe = observe

    def __call__(self, step: int, microbatches: Sequence[Microbatch]) -> StepResult:
        """Return the mean loss over the global batch of `step` after updating the parameters; a collective.

        Over this replica's part of the batch where it trains for several steps by itself.
        """
        if self.outer_sync is None:
            return self._updated(step, microbatches)
        before = self.outer_sync.pending
        result = self._updated(step, microbatches) if before is None else StepResult(**before)
        if self.outer_sync.is_due(step):
            self._observe("sync")
        has_synced = self.outer_sync(step)
        self.outer_sync.pending = None if has_synced else asdict(result)
        return result if has_synced else replace(result, decision="again")

    def _updated(self, step: int, microbatches: Sequence[Microbatch]) -> StepResult:
        rate = learning_rate(step, self.job.train.steps, self.job.optimizer)
        self.optimizer.set_learning_rate(rate)
        if self.in_backward is not None and self.before_update is not None:
            self.before_update()
        self.float8_gathers.update_scales()
        buffers = self._buffers_before()
        kept = self._kept_for_recomputation(step)
        total_loss = self.pipeline.step(self._stage_inputs(step, microbatches))
        self._observe("gradients")
        require_unchanged(buffers, persistent_buffers(self.model), self.job)
        self._require_gradients(step)
        num_microbatches = len(microbatches) if self.replicas is None else self.job.num_microbatches(self.meshes.layout)
        self.gradients.finish(num_microbatches)
        if kept is not None:
            assert self.replica_guard is not None
            settled = self.replica_guard.settle(step, total_loss, partial(self._recompute, step, microbatches, kept))
            if settled is None:
                return StepResult(math.nan, math.nan, rate, decision="restore")
            total_loss = settled
        if self.observe_gradients is not None:
            self.gradients.apply_scale()
            self.observe_gradients(self.model)
        grad_norm = self.gradients.clip(self.job.optimizer.max_grad_norm)
        if self.replicas is not None:
            self.replicas.sum(total_loss)
        own_loss = total_loss.clone()
        loss, loss_metrics = self._mean_loss(total_loss, num_microbatches), self.loss_metrics(self.replicas)
        if self.replicas is not None and not self.replicas.commits():
            self.optimizer.zero_grad()
            return StepResult(loss, grad_norm.item(), rate, decision="again")
        outcome = SKIPPED if self.in_backward is None else UPDATED
        if self.job.guards.not_finite == "stop":
            require_finite(step, loss, grad_norm.item(), partial(self._advice, step, own_loss), outcome)
        decision = "take" if self.guard is None else self.guard.decide(step, loss, grad_norm.item())
        self._observe("optimizer")
        if decision == "take":
            if self.in_backward is None and self.before_update is not None:
                self.before_update()
            self.optimizer.step(self.gradients.scale)
        self.optimizer.zero_grad()
        experts = self.expert_load.after_step(is_taken=decision == "take")
        share_buffers(self.model, self.meshes)
        if self.replica_guard is not None and not self.replica_guard.is_sound(step):
            decision = "restore"
        # What a rank writes of a step is no part of it.
        self._observe("record")
        return StepResult(loss, grad_norm.item(), rate, experts, loss_metrics, decision)

    def _require_gradients(self, step: int) -> None:
        """Raise ConfigError for parameters that train and lack a gradient; a collective.

        In a run's first step, for those that no rank has one of. In each step, for those that backward updates and
        those of a unit of FSDP2 that has not run, which are not completed with zeros.
        """
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        updated = set[nn.Parameter]() if self.in_backward is None else self.in_backward.take_updated()
        without = {parameter for parameter in trained if parameter.grad is None and parameter not in updated}
        # Of a run: an attempt that resumes may begin with a step in which no sample uses some of them.
        if step == 1 and not self._has_checked_gradients:
            without |= unused_everywhere(trained, self.model.missing | without, self.meshes) - updated
        self._has_checked_gradients = True
        self.model.missing.clear()
        if without:
            names = [name for name, parameter in canonical_parameters(self.model) if parameter in without]
            raise without_gradient(step, names, self.job)

    def _replica_guard(self) -> ReplicaGuard:
        copies = ReplicaCopies(self.model, self.meshes, partial(optimizer_state, self.model, self.optimizer))
        guards, checkpoint, train = self.job.guards, self.job.checkpoint, self.job.train
        # No replica check goes with an interval that the run chooses.
        interval = 0 if checkpoint.interval == "auto" else checkpoint.interval
        return ReplicaGuard(guards, copies, self.meshes.device_type, interval, train.last_step)

    def _kept_for_recomputation(self, step: int) -> list[tuple[Tensor, Tensor]] | None:
        """Return what forward changes, each with a copy, where the gradients of `step` are checked; None elsewhere."""
        if self.replica_guard is None or not self.replica_guard.is_due(step):
            return None
        changing = [*persistent_buffers(self.model).values()]
        changing += [statistic for stage in self.model for statistic in statistics_of(stage)]
        return [(tensor, tensor.clone()) for tensor in changing]

    def _recompute(
        self, step: int, microbatches: Sequence[Microbatch], kept: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the loss of forward and backward run again, with new gradients; a collective."""
        self.optimizer.zero_grad()
        for tensor, before in kept:
            tensor.copy_(before)
        self.float8_gathers.update_scales()
        total_loss = self.pipeline.step(self._stage_inputs(step, microbatches))
        self._observe("gradients")
        self.gradients.finish(len(microbatches))
        return total_loss

    def _buffers_before(self) -> dict[str, Tensor]:
        """Return copies of what no forward may change in the first step: exact sums, and replicas, do not see it."""
        has_replicas = self.replicas is not None or self.outer_sync is not None
        if self._has_checked_gradients or not (self.job.train.exact_elastic or has_replicas):
            return {}
        return {name: buffer.clone() for name, buffer in persistent_buffers(self.model).items()}

    def warm_up(self, microbatches: Sequence[Microbatch], *, updates: bool) -> None:
        """Run forward and backward once, for what a first time is slow to do, and drop the gradients; a collective.

        With `updates` the optimizer has its first time, too, which leaves parameters and its state of no use.
        """
        self.pipeline.step(self._stage_inputs(1, microbatches))
        if updates:
            self.optimizer.set_learning_rate(0.0)
            self.gradients.finish(len(microbatches))
            self.gradients.clip(self.job.optimizer.max_grad_norm)
            self.optimizer.step(self.gradients.scale)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def validate(self, batches: Sequence[Sequence[Microbatch]]) -> float:
        """Return the mean loss over the targets of all `batches` of microbatches, without training; a collective."""
        self.model.eval()
        self.float8_gathers.update_scales()
        self._begin_loss_metrics()
        scale = self._loss_scale([microbatch for batch in batches for microbatch in batch])
        totals = [self.pipeline.evaluate([self._stage_input(0, one, scale) for one in batch]) for batch in batches]
        # A checkpoint, which saves shards, may follow.
        reshard_model(self.model)
        self.model.train()
        return self._mean_loss(torch.stack(totals).sum(), sum(len(batch) for batch in batches))

    @torch.no_grad()
    def row_losses(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Return losses_MB (float64): what this rank adds to the sum of each row's next-token losses; a collective.

        That of its shard of the sequence, and 0 on all ranks but one of those that share it. The model's loss must be
        the next-token loss.
        """
        assert isinstance(self.pipeline.loss, NextTokenLoss)
        rows = RowLosses(self.pipeline.loss)
        self.model.train(False)
        self.float8_gathers.update_scales()
        self.pipeline.evaluate(self.evaluated_inputs(microbatches), rows)
        reshard_model(self.model)
        self.model.train()
        if rows.of_microbatches and self.meshes.rank("tp") == 0:
            return torch.stack(rows.of_microbatches)
        size = len(microbatches[0].inputs)
        return torch.zeros(len(microbatches), size, dtype=torch.float64, device=self.meshes.device_type)

    def _mean_loss(self, total: Tensor, num_microbatches: int) -> float:
        """Return the mean of the losses summed by the ranks of the last stage; a collective."""
        layout = self.meshes.layout
        # Each tensor-parallel rank of the last stage has the loss of the same samples.
        dist.all_reduce(total)
        return total.item() / (num_microbatches * layout.dp * layout.cp * layout.tp)

    def _advice(self, step: int, own_loss: Tensor) -> str:
        """Return what to do about a loss of `step` that is not finite, with the ranks whose own is; a collective."""
        wrong = [not local_box(parameter)[0].isfinite().all() for parameter in self.model.parameters()]
        count = torch.tensor(float(any(wrong)), device=self.meshes.device_type)
        dist.all_reduce(count)
        weights = self.job.model.initial_weights
        advice = f"{self._wrong_losses(own_loss)}{ADVICE}"
        if not self.job.optimizer.in_backward:
            advice += SKIP_ADVICE
        if not count and self.job.train.exact_elastic:
            return f"{advice}{EXACT_ADVICE}"
        if not count or weights is None:
            return advice
        if step == 1:
            return f"model.initial_weights = {weights!r} holds NaN or infinity, so take other weights"
        return (
            "parameters held NaN or infinity before the step: if the start of the run warned that "
            f"model.initial_weights = {weights!r} holds them, take other weights, otherwise {ADVICE}"
        )

    def _wrong_losses(self, own_loss: Tensor) -> str:
        """Return the ranks whose own loss is not finite, as the start of an advice; a collective."""
        if self.replicas is not None:
            # The loss is the sum over all replicas already.
            return ""
        flags = torch.zeros(dist.get_world_size(), device=self.meshes.device_type)
        flags[dist.get_rank()] = float(not own_loss.isfinite().all())
        dist.all_reduce(flags)
        return wrong_losses_text(flags.nonzero().flatten().tolist(), len(flags))

    def _stage_inputs(self, step: int, microbatches: Sequence[Microbatch]) -> list[StageInput]:
        """Return this rank's shard of the microbatches, on its device; a collective if targets may be ignored."""
        self._begin_loss_metrics()
        scale = self._loss_scale(microbatches)
        return [self._stage_input(step, microbatch, scale) for microbatch in microbatches]

    def evaluated_inputs(self, microbatches: Sequence[Microbatch]) -> list[StageInput]:
        """Return this rank's shard of microbatches that are only evaluated, on its device."""
        return [self._stage_input(0, microbatch, None) for microbatch in microbatches]

    def _loss_scale(self, microbatches: Sequence[Microbatch]) -> Tensor | None:
        """Return what makes losses of microbatches means over the targets that count; a collective, or None for 1."""
        if not self.may_ignore_targets or not isinstance(self.pipeline.loss, NextTokenLoss):
            return None
        if isinstance(self.pipeline.loss, PreferenceLoss):
            is_pair = [one.pairs != NO_PAIR for one in microbatches if one.pairs is not None]
            return rows_per_pair(is_pair, torch.device(self.meshes.device_type))
        targets = [microbatch.targets for microbatch in microbatches]
        sum_outside = None if self.replicas is None else self.replicas.sum
        return 1 / counted_share(targets, torch.device(self.meshes.device_type), sum_outside)

    def _stage_input(self, step: int, microbatch: Microbatch, loss_scale: Tensor | None) -> StageInput:
        device = torch.device(self.meshes.device_type)
        tensors = [microbatch.inputs, microbatch.targets, microbatch.documents, microbatch.positions]
        if self.meshes.layout.cp > 1:
            tensors = [None if tensor is None else tensor[:, self.positions_S] for tensor in tensors]
        inputs, targets, documents, positions = (
            None if tensor is None else tensor.to(device, non_blocking=True) for tensor in tensors
        )
        assert inputs is not None
        assert targets is not None
        context: dict[str, Any] = {}
        if self._takes_positions:
            positions = self.positions_S.to(device) if positions is None else positions
            context = {"positions_S": positions, "documents_BS": documents}
        of_loss: tuple[Pairs, ...] = ()
        if microbatch.pairs is not None and documents is not None:
            of_loss = (self._pairs(documents, microbatch.pairs, device),)
        prepare = partial(seed_everything, self.job.train.seed, step, microbatch.first_slot)
        return StageInput(inputs, targets, context, prepare, of_loss, loss_scale)

    def _pairs(self, documents_BS: Tensor, pairs_BP: Tensor, device: torch.device) -> Pairs:
        is_pair_BP = pairs_BP != NO_PAIR
        reference_BP2 = torch.zeros(*pairs_BP.shape, 2, dtype=torch.float64)
        if self.reference is not None:
            reference_BP2[is_pair_BP] = self.reference[pairs_BP[is_pair_BP]]
        return Pairs(documents_BS, reference_BP2.to(device), is_pair_BP.to(device, non_blocking=True))

    def loss_metrics(self, replicas: ReplicaGroup | None = None) -> dict[str, float]:
        """Return what the loss has counted in the last step or validation; a collective, with other `replicas` too."""
        loss, sum_outside = self.pipeline.loss, None if replicas is None else replicas.sum
        return loss.metrics(sum_outside) if isinstance(loss, NextTokenLoss) else {}

    def _begin_loss_metrics(self) -> None:
        if isinstance(self.pipeline.loss, NextTokenLoss):
            self.pipeline.loss.begin()

    @property
    def _takes_positions(self) -> bool:
        return all(getattr(stage, "takes_positions", False) for stage in self.model)

    def _own_positions(self) -> Tensor:
        layout = self.meshes.layout
        return sequence_indices(self.job.train.seq_len, self.meshes.rank("cp"), layout.cp, layout.cp_method)


def seed_everything(seed: int, step: int, first_slot: int) -> None:
    """Seed every generator from (seed, step, slot of the microbatch), so that checkpoints save no generator.

    Resuming is exact, and ranks of the same slot draw the same dropout.
    """
    mixed = int(np.random.SeedSequence([seed, step, first_slot]).generate_state(1, np.uint64)[0])
    # torch.manual_seed would also queue seeds for unused devices, each with a stack trace (2.13).
    torch.default_generator.manual_seed(mixed % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(mixed % 2**63)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)
