"""Training state of one rank, built from a Job: model, optimizer and data."""

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.checkpoint.checkpoint import (
    CopyInMemory,
    load,
    load_earlier,
    load_newest,
    newest_intact,
    saved_sections,
)
from meshwright.checkpoint.hf.hf_model import BuiltInModel, HfModel
from meshwright.checkpoint.hf.own_model import OwnModel, has_format
from meshwright.checkpoint.hf.weights import load_hf_weights
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.saved_model import MODEL_FIELDS
from meshwright.data.dataset import Dataset, build_dataset
from meshwright.data.loader import Loader
from meshwright.data.order import Share, check_resumable
from meshwright.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    InfeasibleLayout,
    NonFiniteError,
    Retryable,
    UnsupportedError,
)
from meshwright.fault_tolerance.replicas.replica_group import ReplicaGroup
from meshwright.log import logger
from meshwright.memory.memory_pools import memory_pools
from meshwright.models.build import build_model
from meshwright.models.contract import blocks_of, require_shardable
from meshwright.parallelism.apply import parallelize
from meshwright.parallelism.data.fully_sharded import TORCH_DTYPES, reshard_model
from meshwright.parallelism.data.materialize import fill_from
from meshwright.parallelism.data.place_in_pools import place_in_pools
from meshwright.parallelism.exact_sums import sum_exactly
from meshwright.parallelism.gradients import share_tied
from meshwright.parallelism.loss import make_loss
from meshwright.parallelism.mesh import Meshes, build_meshes
from meshwright.parallelism.pipeline.pipeline import Pipeline
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, copies_by_name, persistent_buffers
from meshwright.parallelism.torch_private.torch_fsdp import sum_shards_with
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.user_object import import_object
from meshwright.spec.job.validity import attention_device_problem, layout_problems
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import read_schedule
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.layout.stage_split import split_stages, stage_boundaries
from meshwright.spec.model.hf.hub_cache import local_path
from meshwright.spec.model.hf.name_map import BUFFER
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.unseen_fields import differing_fields, fields_unseen_in_shapes
from meshwright.spec.run.run import Run
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.optimizer.optimizer import build_optimizer, optimizer_state
from meshwright.trainer.optimizer.outer_optimizer import OuterOptimizer
from meshwright.trainer.optimizer.update_groups import require_updatable
from meshwright.trainer.step.outer_sync import OuterSync
from meshwright.trainer.step.train_step import TrainStep

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
        self.loader = Loader(
            dataset,
            share,
            seed=job.train.seed,
            shuffle=job.data.shuffle,
            pin_memory=ranks.device.type == "cuda",
        )
        self.replicas: ReplicaGroup | None = None
        self.step = build_train_step(job, meshes, pipeline)
        self.optimizer = self.step.optimizer
        self.step.may_ignore_targets = dataset.may_ignore_targets

    @classmethod
    def build(cls, job: Job, ranks: Ranks, dataset: Dataset | None = None) -> Self:
        """Return the training of `job` on this rank, at step 0, with its initial weights; a collective.

        `dataset` replaces the one that the job names.
        """
        meshes, pipeline, num_parameters = build_pipeline(job, ranks)
        dataset = dataset or build_dataset(job.data, job.train.seq_len)
        require_vocabulary(job, dataset)
        training = cls(job, ranks, meshes, dataset, pipeline)
        training.num_parameters = num_parameters
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
        except DamagedCheckpoint as error:
            logger.warning("this replica's own state is not loaded, but that of the run's checkpoint: %s", error)
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
            return 0
        step, metadata = found
        self.take_over(metadata)
        return step

    def take_over(self, metadata: dict[str, Any]) -> None:
        """Take over the rest of a state whose tensors were loaded or received; a collective."""
        if (changed := differing_fields(metadata.get(MODEL_FIELDS), resolve_architecture(self.job.model))) is not None:
            raise ConfigError(
                f"the model is not that of the checkpoint: {changed}: a run keeps its model, so set it back, or start "
                "a new run from its weights: `meshwright export`, then model.initial_weights"
            )
        share_tied(self.model, self.meshes)
        check_resumable(metadata["position"], self.loader.position)
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
        self.replicas = replicas
        if trains_locally:
            self.step.outer_sync = OuterSync(self.job, OuterOptimizer(self.model, self.job.replicas), replicas)
            return
        self.step.replicas = replicas
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


def _holds_outer(folder: Path) -> bool:
    """Return whether a checkpoint holds the state of an outer optimizer, or is damaged; a collective."""
    peers, holds = GroupPeers(), True
    if peers.rank == 0:
        with suppress(CheckpointError):
            holds = OUTER in saved_sections(folder)
    found: bool = peers.publish(holds)
    return found


def build_pipeline(job: Job, ranks: Ranks, microbatches: Sequence[int] | None = None) -> tuple[Meshes, Pipeline, int]:
    """Return this rank's meshes, pipeline and the number of parameters of the whole model; a collective.

    With `microbatches` the schedule runs only these.
    """
    whole = build_unsharded(job)
    require_positions(job, whole)
    require_updatable(job.optimizer, whole)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    layout = with_stage_boundaries(job, ranks.layout_of(job), whole)
    require_valid(job, layout)
    require_attention(job, layout, ranks.device.type)
    described = described_for_hf(job, whole)
    meshes = build_meshes(
        layout, ranks.device.type, has_outer_replicas=ranks.is_replica and job.replicas.sums_gradients
    )
    schedule = build_schedule(layout, job.num_microbatches(layout), read_schedule(layout))
    if microbatches is not None:
        schedule = schedule.of_microbatches(microbatches)
    precision = job.precision.replace(reduce=job.reduce_dtype)
    model = parallelize(whole, meshes, precision, schedule, seq_len=job.train.seq_len, seed=job.train.seed)
    if job.train.exact_elastic:
        num_terms = job.global_batch_size // layout.microbatch_size * layout.cp * layout.tp
        sum_exactly(model, num_terms, num_terms * job.train.validation_batches)
    place_in_pools(model, memory_pools(job.memory, ranks.device), meshes)
    fill_from_hf(model, job.model, described)
    share_tied(model, meshes)
    compute_dtype, loss = TORCH_DTYPES[job.precision.compute], make_loss(whole, meshes, model.last)
    return meshes, Pipeline(model, schedule, loss, meshes, compute_dtype), num_parameters


def build_train_step(job: Job, meshes: Meshes, pipeline: Pipeline) -> TrainStep:
    """Return the step of a pipeline's stages, with the optimizer of their parameters."""
    model = pipeline.stages
    assert model.pools is not None
    backend, pool = meshes.layout.optimizer_backend, model.pools.optimizer_state
    optimizer = build_optimizer(model, job.optimizer, backend, pool, is_exact=job.train.exact_elastic)
    return TrainStep(job, model, meshes, optimizer, pipeline)


def build_unsharded(job: Job) -> nn.Module:
    """Return the whole model: on the meta device if it has initial(), else with real weights."""
    is_ours = resolve_architecture(job.model) is not None
    if is_ours or hasattr(import_object("model.source", job.model.source), "initial"):
        with torch.device("meta"):
            model = build_model(job.model)
    else:
        # The constructor draws its weights from any generator; the same seeds make them equal on all ranks.
        torch.manual_seed(job.train.seed)
        np.random.seed(job.train.seed % 2**32)
        random.seed(job.train.seed)
        model = build_model(job.model)
    require_shardable(model)
    return model.to(torch.float64) if job.precision.compute == "float64" else model


def with_stage_boundaries(job: Job, layout: Layout, model: nn.Module) -> Layout:
    """Return `layout` with stage boundaries: balanced by cost for a known architecture, else by blocks."""
    if layout.pp == 1 or layout.stage_boundaries is not None:
        return layout
    architecture = resolve_architecture(job.model)
    if architecture is not None:
        return layout.replace(stage_boundaries=stage_boundaries(layout, model_spec(architecture), job.train.seq_len))
    # Unknown costs: equal blocks, free embedding and head.
    costs = [0, *(1 for _ in blocks_of(model)), 0]
    return layout.replace(stage_boundaries=split_stages(costs, costs, layout.num_stages))


def require_valid(job: Job, layout: Layout) -> None:
    """Raise InfeasibleLayout that lists all problems of `layout` for this job."""
    problems: list[str] = [*layout_problems(job, layout)]
    if layout.activation_checkpoint == "auto":
        problems.append(
            'layout.activation_checkpoint = "auto": only `meshwright train` resolves it, before ranks start; set '
            "layout.activation_checkpoint to none, selective or full"
        )
    if layout.compile == "auto":
        problems.append(
            'layout.compile = "auto": only `meshwright train` resolves it, before ranks start; set layout.compile to '
            "true or false"
        )
    if problems:
        raise InfeasibleLayout("\n".join(problems))


def require_attention(job: Job, layout: Layout, device_type: str) -> None:
    """Raise InfeasibleLayout where devices of this type do not run the layout's attention backend."""
    problem = attention_device_problem(job, layout, device_type)
    if problem is not None:
        raise InfeasibleLayout(problem)


def described_for_hf(job: Job, whole: nn.Module) -> HfModel | None:
    """Return what a Hugging Face folder holds of the model; None where none is read, and no user's table is checked.

    Raises ConfigError for a user's table that does not fit, with which no export would follow the training.
    """
    is_read, architecture = job.model.initial_weights is not None, resolve_architecture(job.model)
    if architecture is not None:
        return BuiltInModel(architecture) if is_read else None
    is_needed = is_read or job.checkpoint.export != "none"
    return OwnModel(job.model.source, whole) if is_needed or has_format(whole) else None


def fill_from_hf(model: nn.Module, section: ModelSection, described: HfModel | None) -> None:
    """Copy the weights of model.initial_weights, if set, into this rank's shards of `model`; a collective."""
    if section.initial_weights is None or described is None:
        return
    names, buffers = [name for name, _ in canonical_parameters(model)], persistent_buffers(model)
    names += [f"{BUFFER}{name}" for name in buffers]
    weights = load_hf_weights(local_path(section.initial_weights), described, names)
    fill_from(model, weights.__getitem__)
    for name, buffer in buffers.items():
        buffer.copy_(weights[f"{BUFFER}{name}"])
    weights.warn_of_not_finite(GroupPeers())


def require_positions(job: Job, model: nn.Module) -> None:
    """Raise ConfigError for data.mask_documents with a model that takes no documents."""
    if job.data.mask_documents and not getattr(model, "takes_positions", False):
        raise ConfigError(
            f"data.mask_documents = true: model.source = {job.model.source!r} must take the documents of tokens; give "
            "it takes_positions = True and forward(inputs, positions, documents) (see models/contract.py), or set "
            "data.mask_documents to false"
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
