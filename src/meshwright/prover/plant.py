"""Fault injection: breaks one axis of a training, from outside, so that a proof can be seen to fail.

Each fault is a known bug of such code: training continues and the loss falls, but the model is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from meshwright.data.loader import Loader
from meshwright.data.order import Share
from meshwright.parallelism.context.sequence_shards import sequence_indices
from meshwright.parallelism.expert.expert_parallel import TokenExchange
from meshwright.spec.run.proof import PlantedAxis
from meshwright.trainer.step.training import Training


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
