"""Recording of a few steps of the real trainer on one rank, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.data.dataset import Dataset, TokenDataset, build_dataset
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box, silence_known_warnings
from meshwright.prover.boxes import Box, Boxes, Record
from meshwright.prover.ignored_targets import WithIgnoredTargets
from meshwright.prover.plant import plant
from meshwright.spec.job.job import Job
from meshwright.spec.run.proof import PlantedAxis
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training


def record(job: Job, device: str, planted: PlantedAxis | None, repeat: bool) -> tuple[Record, bool | None]:
    """Return this rank's record of `job`, and whether a second run was bitwise equal (or None); a collective."""
    silence_known_warnings()
    first = _record_once(job, device, planted)
    return first, first.is_equal(_record_once(job, device, planted)) if repeat else None


def _record_once(job: Job, device: str, planted: PlantedAxis | None) -> Record:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), _own_device(device))
    training = Training.build(job, ranks, _dataset(job))
    if planted is not None:
        plant(planted, training)
    gradients: list[Boxes] = []
    training.step.observe_gradients = lambda model: gradients.append(_gradient_boxes(model))
    initial_weights = _boxes(canonical_parameters(training.model))
    results = [training.step(step, training.loader.microbatches(step - 1)) for step in range(1, job.train.steps + 1)]
    training.loader.close()
    return Record(
        initial_weights=initial_weights,
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        gradients=gradients,
        weights=_boxes(canonical_parameters(training.model)),
    )


def _dataset(job: Job) -> Dataset:
    """Return the job's dataset; token samples ignore some targets, user data is unchanged."""
    dataset = build_dataset(job.data, job.train.seq_len)
    return WithIgnoredTargets(dataset, job.train.seq_len) if isinstance(dataset, TokenDataset) else dataset


def _own_device(device: str) -> torch.device:
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _gradient_boxes(model: nn.Module) -> Boxes:
    named = canonical_parameters(model)
    return _boxes((name, parameter.grad) for name, parameter in named if parameter.grad is not None)


def _boxes(named: Iterable[tuple[str, Tensor]]) -> Boxes:
    boxes = {}
    for name, tensor in named:
        local, offsets = local_box(tensor.detach())
        # A copy: the next step overwrites the tensor.
        values = local.cpu().numpy().copy()
        boxes[name] = Box(tuple(tensor.shape), tuple(offsets), values)
    return boxes
