"""Recording of a few steps of the real trainer on one rank, as NumPy arrays, and faults to record on purpose.

Fault injection: breaks one axis of a training, from outside, so that a proof can be seen to fail.
Each fault is a known bug of such code: training continues and the loss falls, but the model is wrong.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.data.loader import Loader
from meshwright.data.order import Share
from meshwright.parallelism.context.context_parallel import sequence_indices
from meshwright.parallelism.expert.expert_parallel import TokenExchange
from meshwright.parallelism.torch_private.torch_compat import (
    canonical_parameters,
    local_box,
    persistent_buffers,
    silence_known_warnings,
)
from meshwright.prover.differences import Record, RecordedShard, RecordedShards
from meshwright.prover.proof_data import proof_dataset
from meshwright.spec.job.job import Job
from meshwright.spec.run.proof import PlantedAxis
from meshwright.trainer.launch.ranks import Ranks
from meshwright.trainer.step.score_pairs import score_pairs
from meshwright.trainer.step.training import Training


def record(job: Job, device: str, planted: PlantedAxis | None, repeat: bool) -> tuple[Record, bool | None]:
    """Return this rank's record of `job`, and whether a second run was bitwise equal (or None); a collective."""
    silence_known_warnings()
    # Worker processes would read the job's samples, not these.
    job = job.replace(data=job.data.replace(num_workers=0))
    first = _record_once(job, device, planted)
    return first, first.is_equal(_record_once(job, device, planted)) if repeat else None


def _record_once(job: Job, device: str, planted: PlantedAxis | None) -> Record:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), _own_device(device))
    training = Training.build(job, ranks, proof_dataset(job))
    if training.dataset.num_pairs:
        training.step.reference = score_pairs(training)
    if planted is not None:
        plant(planted, training)
    gradients: list[RecordedShards] = []
    training.step.observe_gradients = lambda model: gradients.append(_gradient_boxes(model))
    initial_weights = _boxes(_parameters(training.model))
    results = [training.step(step, training.loader.microbatches(step - 1)) for step in range(1, job.train.steps + 1)]
    training.loader.close()
    return Record(
        initial_weights=initial_weights,
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        gradients=gradients,
        weights=_boxes(_parameters(training.model)),
        buffers=_boxes((name, _in_numpy(one)) for name, one in persistent_buffers(training.model).items()),
    )


def _own_device(device: str) -> torch.device:
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _gradient_boxes(model: nn.Module) -> RecordedShards:
    named = canonical_parameters(model)
    return _boxes((name, parameter.grad) for name, parameter in named if parameter.grad is not None)


def _in_numpy(buffer: Tensor) -> Tensor:
    """Return a buffer in a type that NumPy has: it lacks bfloat16."""
    return buffer.double() if buffer.is_floating_point() else buffer


def _parameters(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield the parameters, those of a frozen base in few bits in a type that NumPy can subtract."""
    for name, parameter in canonical_parameters(model):
        yield name, parameter if parameter.dtype in (torch.float32, torch.float64) else parameter.float()


def _boxes(named: Iterable[tuple[str, Tensor]]) -> RecordedShards:
    boxes = {}
    for name, tensor in named:
        local, offsets = local_box(tensor.detach())
        # A copy: the next step overwrites the tensor.
        values = local.cpu().numpy().copy()
        boxes[name] = RecordedShard(tuple(tensor.shape), tuple(offsets), values)
    return boxes


def plant(axis: PlantedAxis, training: Training) -> None:
    """Inject the fault of `axis` into `training` if the degree of the axis is above 1."""
    if getattr(training.layout, axis) > 1:
        _PLANTERS[axis](training)


def _skip_tp_gradient_sum(training: Training) -> None:
    training.step.gradients.summed_over_tp = []


def _shift_positions(training: Training) -> None:
    layout, seq_len = training.layout, training.job.train.seq_len
    next_rank = (training.meshes.rank("cp") + 1) % layout.cp
    positions_S = sequence_indices(seq_len, next_rank, layout.cp, layout.cp_method)

    def use_next_positions(
        stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"positions_S": positions_S.to(kwargs["positions_S"].device)}

    for stage in training.model:
        stage.register_forward_pre_hook(use_next_positions, with_kwargs=True, prepend=True)


def _use_stale_activations(training: Training) -> None:
    for number in training.model.numbers:
        if number > 0:
            training.model[number].register_forward_pre_hook(_stale_input())


def _stale_input() -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    previous: list[Tensor] = []

    def pass_previous(stage: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        received, *others = args
        stale = previous.pop() if previous else received.detach()
        previous.append(received.detach())
        # Gradients flow as before; only the values are stale.
        return (received + (stale - received).detach(), *others)

    return pass_previous


def _misplace_expert_rows(training: Training) -> None:
    for module in training.model.modules():
        if isinstance(module, TokenExchange):
            module.register_forward_hook(lambda exchange, args, rows_RD: rows_RD.roll(1, 0))


def _repeat_samples(training: Training) -> None:
    job, layout = training.job, training.layout
    training.loader.close()
    share = Share(job.global_batch_size, layout.microbatch_size, 0, layout.dp)
    training.loader = Loader(training.dataset, share, seed=job.train.seed, shuffle=job.data.shuffle)


_PLANTERS: Mapping[PlantedAxis, Callable[[Training], None]] = {
    "tp": _skip_tp_gradient_sum,
    "cp": _shift_positions,
    "pp": _use_stale_activations,
    "ep": _misplace_expert_rows,
    "dp": _repeat_samples,
}
