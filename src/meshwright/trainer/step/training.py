"""Training state of one rank, built from a Job: model, optimizer and data."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.checkpoint.checkpoint import (
    CopyInMemory,
    load,
    load_earlier,
    load_newest,
    newest_intact,
    saved_sections,
)
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saved_model import MODEL_FIELDS
from meshwright.checkpoint.shards import flatten
from meshwright.data.dataset import build_dataset
from meshwright.data.numbered_samples import Dataset
from meshwright.data.open_loader import open_loader
from meshwright.data.order import Share, check_resumable
from meshwright.data.streams.stream_dataset import StreamDataset
from meshwright.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    NonFiniteError,
    Retryable,
    UnsupportedError,
)
from meshwright.fault_tolerance.replicas.replica_group import ReplicaGroup
from meshwright.log import logger
from meshwright.models.contract import Loss
from meshwright.parallelism.data.adapter_weights import set_magnitudes
from meshwright.parallelism.data.fully_sharded import reshard_model
from meshwright.parallelism.data.materialize import draw_weights
from meshwright.parallelism.gradients import share_tied
from meshwright.parallelism.losses.loss import NextTokenLoss
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.pipeline import Pipeline
from meshwright.parallelism.torch_private.torch_compat import (
    canonical_parameters,
    copies_by_name,
    local_box,
    persistent_buffers,
)
from meshwright.parallelism.torch_private.torch_fsdp import sum_shards_with
from meshwright.spec.job.job import Job
from meshwright.spec.layout.schedule.action import read_schedule
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.model.hf.name_map import BUFFER
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.unseen_fields import differing_fields, fields_unseen_in_shapes
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.optimizer.optimizer import optimizer_state
from meshwright.trainer.optimizer.outer_optimizer import OuterOptimizer
from meshwright.trainer.step.build_pipeline import build_pipeline, build_train_step
from meshwright.trainer.step.outer_sync import OuterSync

OUTER: Final = "outer"
"""Section of a checkpoint with the state of the outer optimizer."""


class Training:
    """Parallelized model, optimizer and data of one rank."""

    num_parameters: int
    """Parameters of the whole model, tied ones counted once."""

    def __init__(self, job: Job, ranks: Ranks, meshes: Meshes, dataset: Dataset, pipeline: Pipeline) -> None:
        self.job, self.ranks, self.meshes, self.dataset = job, ranks, meshes, dataset
        self.model = pipeline.stages
        self.layout = layout = meshes.layout
        share = Share(job.global_batch_size, layout.microbatch_size, meshes.dp_rank, layout.dp)
        self.loader = open_loader(dataset, share, job, pin_memory=ranks.device.type == "cuda")
        self.replicas: ReplicaGroup | None = None
        self._has_weights = True
        self.step = build_train_step(job, meshes, pipeline)
        self.optimizer = self.step.optimizer
        self.step.may_ignore_targets = dataset.may_ignore_targets

    @classmethod
    def build(cls, job: Job, ranks: Ranks, dataset: Dataset | None = None, *, awaits_state: bool = False) -> Self:
        """Return the training of `job` on this rank, at step 0, with its initial weights; a collective.

        `dataset` replaces the one that the job names. One that `awaits_state`, which it loads or receives, draws its
        weights only if there is none.
        """
        draws_weights = not awaits_state or _reads_weights(job)
        meshes, pipeline, num_parameters = build_pipeline(job, ranks, draws_weights=draws_weights)
        dataset = dataset or build_dataset(job.data, job.train.seq_len, job.train.task)
        require_vocabulary(job, dataset)
        require_ignoring_loss(job, pipeline.loss)
        require_validation(job, dataset)
        training = cls(job, ranks, meshes, dataset, pipeline)
        training.num_parameters = num_parameters
        training._has_weights = draws_weights or not all(hasattr(stage, "initial") for stage in pipeline.stages)
        return training

    def metadata(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint after `step` says of itself, as JSON holds it."""
        architecture = resolve_architecture(self.job.model)
        return {
            "step": step,
            "layout": self.layout.to_dict(),
            "num_ranks": self.ranks.num_ranks,
            "position": self.loader.position,
            MODEL_FIELDS: None if architecture is None else fields_unseen_in_shapes(architecture),
            **({} if self.step.guard is None else {"guard": self.step.guard.state()}),
            **({} if self.step.outer_sync is None else {"outer": self.step.outer_sync.metadata()}),
        }

    def load_newest(self, run: Run, in_memory: CopyInMemory | None = None) -> int:
        """Load the newest checkpoint that is as it was saved and return its step, 0 without one; a collective.

        The copy `in_memory` counts as one.
        """
        if self.step.outer_sync is None:
            return self._take_over(load_newest(run, self.state(), in_memory))
        return self._take_over(newest_intact(run, self._load, GroupPeers()))

    def load_own(self, run: Run, step: int) -> bool:
        """Load the checkpoint after `step` of this replica alone, if there is an intact one; a collective."""
        peers = GroupPeers()
        if not peers.publish(run.checkpoint(step).exists()):
            return False
        try:
            self.take_over(self._load(run.checkpoint(step)))
        except DamagedCheckpoint:
            logger.warning(
                "%s is damaged: this replica takes the state of the run's checkpoint instead of its own, and the run "
                "ends with other bits than one that was never stopped",
                run.checkpoint(step),
            )
            return False
        return True

    def _load(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint's tensors, also one without an outer optimizer, and return its metadata; a collective."""
        state, outer = self.state(), self.step.outer_sync
        assert outer is not None
        if _holds_outer(folder):
            return load(folder, state)
        del state[OUTER]
        metadata = load(folder, state)
        # Until then the run summed gradients in every step.
        outer.optimizer.restart()
        return metadata

    def _take_over(self, found: tuple[int, dict[str, Any]] | None) -> int:
        """Return the step of a checkpoint whose tensors were loaded, having taken over the rest; a collective."""
        if found is None:
            self._draw_weights()
            return 0
        step, metadata = found
        self.take_over(metadata)
        return step

    def warm_up(self) -> None:
        """Do once what the first step would be slow to do, before a state is received or loaded; a collective."""
        # One microbatch: shared as finely as the batch allows.
        self.share(0, self.job.num_microbatches(self.layout))
        # The optimizer allocates its state first: what lasts leaves no gaps then in what each step allocates and frees.
        self.state()
        self.step.warm_up(self.loader.microbatches(0), updates=not self._has_weights)
        # Again: on a host, what the first time has freed has other gaps than what a step needs, and half of the memory
        # for the gradients of the first step came from the system, in 0.2 s for 340 MB (2026-11-28).
        self.step.warm_up(self.loader.microbatches(0), updates=False)
        reshard_model(self.model)

    def forget_weights(self) -> bool:
        """Have the initial weights drawn again where there is no checkpoint to load; return whether they can be."""
        can_draw = not _reads_weights(self.job) and all(hasattr(stage, "initial") for stage in self.model)
        self._has_weights = self._has_weights and not can_draw
        return can_draw

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """Draw the initial weights if that was put off, and forget what the optimizer did before; a collective."""
        if self._has_weights:
            return
        for copies in flatten(optimizer_state(self.model, self.optimizer)).values():
            for copy in copies:
                local_box(copy)[0].zero_()
        for stage in self.model:
            draw_weights(stage, self.meshes.device_type, self.job.train.seed)
        set_magnitudes(self.model, self.meshes)
        share_tied(self.model, self.meshes)
        if self.step.outer_sync is not None:
            self.step.outer_sync.optimizer.restart()
        self._has_weights = True

    def take_over(self, metadata: dict[str, Any]) -> None:
        """Take over the rest of a state whose tensors were loaded or received; a collective."""
        if (changed := differing_fields(metadata.get(MODEL_FIELDS), resolve_architecture(self.job.model))) is not None:
            raise ConfigError(
                f"the model is not that of the checkpoint: {changed}: a run keeps its model, so set it back, or start "
                "a new run from its weights: `meshwright export`, then model.initial_weights"
            )
        self._has_weights = True
        share_tied(self.model, self.meshes)
        check_resumable(metadata["position"], self.loader.position)
        self.loader.restore(metadata["position"])
        if self.step.guard is not None:
            self.step.guard.restore(metadata.get("guard", {}))
        if self.step.replica_guard is not None:
            self.step.replica_guard.restored(metadata["step"])
        if self.step.outer_sync is not None:
            self.step.outer_sync.take_over(metadata.get("outer", {}))

    def roll_back(self, run: Run, step: int) -> int:
        """Return to the newest regular checkpoint, leave out the data up to that of `step`, and return its step.

        A checkpoint of a stop is none, so that a run that was stopped ends as one that was not. A collective; raises
        NonFiniteError where there is no checkpoint.
        """
        assert self.step.guard is not None
        reason = self.step.guard.reason
        reshard_model(self.model)
        every = self.job.checkpoint.interval
        assert every != "auto"  # refused with guards
        restored = self._take_over(load_earlier(run, self.state(), every))
        if restored == 0:
            raise NonFiniteError(
                f"step {step}: {reason}, and there is no checkpoint to return to: save one earlier "
                "(checkpoint.interval), or lengthen optimizer.warmup_steps"
            )
        self.step.guard.rolled_back(step - restored)
        return restored

    def restore(self, run: Run, step: int) -> int:
        """Return to the newest checkpoint, since numbers of `step` were wrong, and return its step; a collective.

        Raises Retryable where there is none: a new start computes the first steps again.
        """
        self.optimizer.zero_grad()
        reshard_model(self.model)
        restored = self.load_newest(run)
        if restored == 0:
            raise Retryable(
                f"step {step}: numbers of replicas differ, and there is no checkpoint to return to: start the run "
                "again (--resume), which begins with its first step, or save earlier (checkpoint.interval)"
            )
        return restored

    def state(self) -> dict[str, Any]:
        """Return the tensors of a checkpoint: this rank's shards of parameters, buffers and optimizer state."""
        buffers = {f"{BUFFER}{name}": buffer for name, buffer in persistent_buffers(self.model).items()}
        outer = self.step.outer_sync
        return {
            **({} if outer is None else {OUTER: outer.optimizer.state()}),
            "model": {**copies_by_name(canonical_parameters(self.model)), **buffers},
            "optimizer": optimizer_state(self.model, self.optimizer),
        }

    def join_replicas(self, replicas: ReplicaGroup) -> None:
        """Sum gradients and losses over independent replicas from now on, or what has changed every few steps.

        Raises UnsupportedError for a model whose step sums something else over all ranks.
        """
        trains_locally = self.job.replicas.trains_locally
        if self.model.most_experts:
            raise UnsupportedError(
                "a mixture of experts: the loads of its experts are not summed over independent replicas yet: set "
                "replicas.independent to false"
            )
        if isinstance(self.dataset, StreamDataset):
            raise UnsupportedError(
                f"data.source = {self.job.data.source!r} is an iterable, which one rank reads for all: replicas that "
                "start and fail by themselves cannot read it: set replicas.independent to false, or give it numbered "
                "samples (__len__ and __getitem__)"
            )
        self.replicas = replicas
        if trains_locally:
            self.step.outer_sync = OuterSync(self.job, OuterOptimizer(self.model, self.job.replicas), replicas)
            return
        self.step.replicas = replicas
        if self.model.replica_sums is not None:
            self.model.replica_sums.start_sum = replicas.start_sum
            return
        for stage in self.model:
            assert isinstance(stage, FSDPModule)
            sum_shards_with(stage, replicas.sum)

    def share(self, member: int, num_members: int) -> None:
        """Take the samples of a member of so many independent replicas from now on."""
        layout = self.layout
        share = Share(
            self.job.global_batch_size, layout.microbatch_size, self.meshes.dp_rank, layout.dp, member, num_members
        )
        self.loader.set_share(share)
        self.step.pipeline.set_schedule(build_schedule(layout, len(share.slots), read_schedule(layout)))

    @property
    def summed_bytes(self) -> int:
        """Return the bytes that this rank has summed over independent replicas so far."""
        return 0 if self.replicas is None else self.replicas.summed_bytes

    def changing_names(self) -> list[str]:
        """Return the names in a checkpoint of tensors that a forward may change, such as running statistics."""
        return [f"model/{BUFFER}{name}" for name in persistent_buffers(self.model)]


def _reads_weights(job: Job) -> bool:
    """Return whether a run starts from weights in files."""
    return bool(job.model.initial_weights or job.adapter.initial)


def _holds_outer(folder: Path) -> bool:
    """Return whether a checkpoint holds the state of an outer optimizer, or is damaged; a collective."""
    peers, holds = GroupPeers(), True
    if peers.rank == 0:
        with suppress(CheckpointError):
            holds = OUTER in saved_sections(folder)
    found: bool = peers.publish(holds)
    return found


def require_ignoring_loss(job: Job, loss: Loss) -> None:
    """Raise ConfigError for padded samples with a loss of the model's own, which is no mean over targets that count."""
    if job.data.packing == "split" or isinstance(loss, NextTokenLoss):
        return
    raise ConfigError(
        f'data.packing = "{job.data.packing}" pads sequences, which takes the next-token loss, and model.source = '
        f'{job.model.source!r} has a loss of its own: remove that method, or set data.packing to "split"'
    )


def require_vocabulary(job: Job, dataset: Dataset) -> None:
    """Raise ConfigError if the tokenizer has more tokens than the model's embedding has rows."""
    architecture = resolve_architecture(job.model)
    if architecture is None or dataset.vocab_size is None or dataset.vocab_size <= architecture.vocab_size:
        return
    raise ConfigError(
        f'data.tokenizer = "{job.data.tokenizer}" has {dataset.vocab_size} tokens, more than vocab_size = '
        f"{architecture.vocab_size} of the model {job.model.source}: "
        f"set model.options.vocab_size to {dataset.vocab_size} or more"
    )


def require_validation(job: Job, dataset: Dataset) -> None:
    """Raise ConfigError if a stream is to be validated on samples that it has not."""
    interval = job.train.validation_interval
    if not interval or not isinstance(dataset, StreamDataset) or dataset.num_validation_samples:
        return
    raise ConfigError(
        f"train.validation_interval = {interval}, but data.source = {job.data.source!r} is an iterable, of which no "
        "samples are held out: give it an attribute `validation` with __len__() and __getitem__(index), or set "
        "train.validation_interval to 0"
    )
