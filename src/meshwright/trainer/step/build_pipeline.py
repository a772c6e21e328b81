"""What a job asks for, built: the model with its weights, in stages, parallelized, with a schedule and a step."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.checkpoint.hf.hf_model import BuiltInModel, HfModel
from meshwright.checkpoint.hf.own_model import OwnModel, has_format
from meshwright.checkpoint.hf.weights import load_hf_weights
from meshwright.checkpoint.peers import GroupPeers
from meshwright.checkpoint.peft.read_adapter import read_peft_folder
from meshwright.errors import ConfigError, InfeasibleLayout, UnsupportedError
from meshwright.memory.memory_pools import memory_pools
from meshwright.models.adapted_linear import adapter_names, add_adapter
from meshwright.models.build import build_model
from meshwright.models.contract import Loss, blocks_of, require_shardable
from meshwright.parallelism.apply import parallelize
from meshwright.parallelism.data.adapter_weights import (
    base_parameters,
    copy_adapter,
    set_magnitudes,
)
from meshwright.parallelism.data.fully_sharded import TORCH_DTYPES
from meshwright.parallelism.data.materialize import fill_from, materialize_stages
from meshwright.parallelism.data.place_in_pools import place_in_pools
from meshwright.parallelism.exact_sums import sum_exactly
from meshwright.parallelism.gradients import share_tied
from meshwright.parallelism.losses.loss import NextTokenLoss, make_loss
from meshwright.parallelism.losses.preference_loss import PreferenceLoss
from meshwright.parallelism.losses.token_accuracy import TokenAccuracy
from meshwright.parallelism.mesh import Meshes, build_meshes
from meshwright.parallelism.pipeline.pipeline import Pipeline
from meshwright.parallelism.torch_private.torch_compat import persistent_buffers
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
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.optimizer.optimizer import build_optimizer
from meshwright.trainer.optimizer.update_groups import require_updatable
from meshwright.trainer.step.train_step import TrainStep


def build_pipeline(
    job: Job, ranks: Ranks, microbatches: Sequence[int] | None = None, *, draws_weights: bool = True
) -> tuple[Meshes, Pipeline, int]:
    """Return this rank's meshes, pipeline and the number of parameters of the whole model; a collective.

    With `microbatches` the schedule runs only these. Without `draws_weights` weights that a seed gives are left zero.
    """
    whole = build_unsharded(job)
    require_positions(job, whole)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    described = described_for_hf(job, whole)
    add_adapter(whole, job.adapter, job.train.seed)
    adapter = initial_adapter(job, whole, described)
    require_updatable(job.optimizer, whole)
    layout = with_stage_boundaries(job, ranks.layout_of(job), whole)
    require_valid(job, layout)
    require_attention(job, layout, ranks.device.type)
    meshes = build_meshes(
        layout, ranks.device.type, has_outer_replicas=ranks.is_replica and job.replicas.sums_gradients
    )
    schedule = build_schedule(layout, job.num_microbatches(layout), read_schedule(layout))
    if microbatches is not None:
        schedule = schedule.of_microbatches(microbatches)
    precision = job.precision.replace(reduce=job.reduce_dtype)
    model = parallelize(whole, meshes, precision, schedule, job.train.seq_len)
    materialize_stages(model, meshes, job.train.seed, draws_weights=draws_weights)
    if job.train.exact_elastic:
        num_terms = job.global_batch_size // layout.microbatch_size * layout.cp * layout.tp
        sum_exactly(model, num_terms, num_terms * job.train.validation_batches)
    place_in_pools(model, memory_pools(job.memory, ranks.device), meshes)
    fill_from_hf(model, job.model, described)
    set_magnitudes(model, meshes)
    copy_adapter(model, adapter)
    share_tied(model, meshes)
    accuracy = TokenAccuracy(meshes) if job.train.task == "sft" else None
    compute_dtype, loss = TORCH_DTYPES[job.precision.compute], make_loss(whole, meshes, model.last, accuracy)
    if job.train.task == "dpo":
        loss = preference_loss(job, loss, meshes)
    return meshes, Pipeline(model, schedule, loss, meshes, compute_dtype), num_parameters


def preference_loss(job: Job, token_loss: Loss, meshes: Meshes) -> PreferenceLoss:
    """Return the loss of pairs from that of tokens; raises UnsupportedError for a loss of the model's own."""
    if isinstance(token_loss, NextTokenLoss):
        return PreferenceLoss(job.dpo, meshes, token_loss)
    raise UnsupportedError(
        f'train.task = "dpo" takes the log-probabilities of tokens, and model.source = {job.model.source!r} has a loss '
        "of its own: remove that method, or set train.task to pretrain"
    )


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
    is_read = job.model.initial_weights is not None or job.adapter.initial is not None
    architecture = resolve_architecture(job.model)
    if architecture is not None:
        return BuiltInModel(architecture) if is_read else None
    is_needed = is_read or job.checkpoint.export != "none"
    return OwnModel(job.model.source, whole) if is_needed or has_format(whole) else None


def fill_from_hf(model: nn.Module, section: ModelSection, described: HfModel | None) -> None:
    """Copy the weights of model.initial_weights, if set, into this rank's shards of `model`; a collective."""
    if section.initial_weights is None or described is None:
        return
    base, buffers = base_parameters(model), persistent_buffers(model)
    names = [*(name for name, _ in base), *(f"{BUFFER}{name}" for name in buffers)]
    weights = load_hf_weights(local_path(section.initial_weights), described, names)
    fill_from(model, base, weights.__getitem__)
    for name, buffer in buffers.items():
        buffer.copy_(weights[f"{BUFFER}{name}"])
    weights.warn_of_not_finite(GroupPeers())


def initial_adapter(job: Job, whole: nn.Module, described: HfModel | None) -> dict[str, Tensor]:
    """Return the tensors of the adapter in adapter.initial by our names; none where it is not set."""
    if job.adapter.initial is None or described is None:
        return {}
    parameters = dict(whole.named_parameters())
    shapes = {name: tuple(parameters[name].shape) for name in adapter_names(whole)}
    return read_peft_folder(Path(job.adapter.initial).expanduser(), job.adapter, described, shapes)


def require_positions(job: Job, model: nn.Module) -> None:
    """Raise ConfigError for data.mask_documents with a model that takes no documents."""
    if job.data.mask_documents and not getattr(model, "takes_positions", False):
        raise ConfigError(
            f"data.mask_documents = true: model.source = {job.model.source!r} must take the documents of tokens; give "
            "it takes_positions = True and forward(inputs, positions, documents) (see models/contract.py), or set "
            "data.mask_documents to false"
        )
