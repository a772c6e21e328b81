"""Recording of a few steps of the real trainer on one rank, as NumPy arrays.

Each sample of tokens ignores a different number of targets. With equal numbers, a loss that counts targets wrongly per
microbatch or per shard of a sequence would still be right.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.data.dataset import Dataset, Sample, TokenDataset, build_dataset
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box, silence_known_warnings
from meshwright.prover.assemble import Record, RecordedShard, RecordedShards
from meshwright.prover.plant import plant
from meshwright.spec.job.job import Job
from meshwright.spec.run.proof import PlantedAxis
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.training import Training

IGNORED = -100
"""Target that the next-token loss ignores, as in torch."""
_STRIDE = 7
"""Difference of the numbers of ignored targets between consecutive samples."""


class WithIgnoredTargets(Dataset):
    """Samples of a token dataset with their first targets ignored; at least one target counts."""

    may_ignore_targets = True

    def __init__(self, dataset: TokenDataset, seq_len: int) -> None:
        num_samples = dataset.num_training_samples + dataset.num_validation_samples
        super().__init__(num_samples, 0.0, dataset.fingerprint)
        self.vocab_size, self.end_of_document = dataset.vocab_size, dataset.end_of_document
        self._dataset, self._seq_len = dataset, seq_len

    def read(self, index: int) -> Sample:
        """Return (inputs, targets), each int64 [seq_len], some of the targets IGNORED."""
        inputs, targets = self._dataset.read(index)
        targets = targets.copy()
        targets[: index * _STRIDE % self._seq_len] = IGNORED
        return inputs, targets


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
    gradients: list[RecordedShards] = []
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


def _gradient_boxes(model: nn.Module) -> RecordedShards:
    named = canonical_parameters(model)
    return _boxes((name, parameter.grad) for name, parameter in named if parameter.grad is not None)


def _boxes(named: Iterable[tuple[str, Tensor]]) -> RecordedShards:
    boxes = {}
    for name, tensor in named:
        local, offsets = local_box(tensor.detach())
        # A copy: the next step overwrites the tensor.
        values = local.cpu().numpy().copy()
        boxes[name] = RecordedShard(tuple(tensor.shape), tuple(offsets), values)
    return boxes
