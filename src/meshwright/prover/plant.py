"""plant: breaks one axis of a training on purpose, from outside, so that a proof can be seen to fail.

Each fault is one that such code is known for: training goes on, the loss falls, and the model is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from meshwright.data.loader import Loader
from meshwright.data.order import Share
from meshwright.parallelism.context.sequence_shards import sequence_indices
from meshwright.parallelism.expert.token_exchange import TokenExchange
from meshwright.prover.faults import degree
from meshwright.spec.run.proof import PlantedAxis
from meshwright.trainer.step.training import Training


def plant(axis: PlantedAxis, training: Training) -> None:
    """Break `axis` of `training`, as prover/faults.py says, where its layout has that axis."""
    if degree(training.layout, axis) > 1:
        _PLANTERS[axis](training)


def _forget_a_sum(training: Training) -> None:
    training.step.gradients.summed_over_tp = []


def _shift_positions(training: Training) -> None:
    layout, seq_len = training.layout, training.job.train.seq_len
    next_rank = (training.meshes.rank("cp") + 1) % layout.cp
    positions_S = sequence_indices(seq_len, next_rank, layout.cp, layout.cp_method)

    def pass_others_positions(
        stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"positions_S": positions_S.to(kwargs["positions_S"].device)}

    for stage in training.model:
        stage.register_forward_pre_hook(pass_others_positions, with_kwargs=True, prepend=True)


def _pass_stale_activations(training: Training) -> None:
    for number in training.model.numbers:
        if number > 0:
            training.model[number].register_forward_pre_hook(_stale_input())


def _stale_input() -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    previous: list[Tensor] = []

    def pass_previous(stage: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        received, *others = args
        stale = previous.pop() if previous else received.detach()
        previous.append(received.detach())
        # Gradients still flow to where they would have: only the values are old.
        return (received + (stale - received).detach(), *others)

    return pass_previous


def _return_rows_misplaced(training: Training) -> None:
    for module in training.model.modules():
        if isinstance(module, TokenExchange):
            module.register_forward_hook(lambda exchange, args, rows_RD: rows_RD.roll(1, 0))


def _give_all_the_same_samples(training: Training) -> None:
    job, layout = training.job, training.layout
    training.loader.close()
    share = Share(job.global_batch_size, layout.microbatch_size, 0, layout.dp)
    training.loader = Loader(training.dataset, share, seed=job.train.seed, shuffle=job.data.shuffle)


_PLANTERS: Mapping[PlantedAxis, Callable[[Training], None]] = {
    "tp": _forget_a_sum,
    "cp": _shift_positions,
    "pp": _pass_stale_activations,
    "ep": _return_rows_misplaced,
    "dp": _give_all_the_same_samples,
}
