"""Load of the experts in a step, and the auxiliary-loss-free bias update that balances it.

Each rank's routers count the rows of their own tokens. One all-reduce over all ranks sums the counts of all layers;
ranks of other pipeline stages fill other layers. Only ratios within a layer are used, so tensor-parallel ranks may
count the same tokens.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from meshwright.models.contract import blocks_of
from meshwright.models.moe import MixtureOfExperts
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.pipeline.stages import Stages

_OTHERS = ("balance_loss", "z_loss", "num_forwards", "padded_rows")
"""Statistics of a layer after the rows of each expert, in the order of MixtureOfExperts.statistics."""


class ExpertLoad:
    """Statistics of all mixtures of experts in the stages of this rank."""

    def __init__(self, model: Stages, meshes: Meshes) -> None:
        self._device = torch.device(meshes.device_type)
        self._mixtures = {
            number: mixture
            for stage in model
            for number, block in enumerate(blocks_of(stage))
            if block is not None
            for mixture in block.modules()
            if isinstance(mixture, MixtureOfExperts)
        }
        # Ranks whose stages have no experts join the all-reduce with an equally large table.
        self._num_experts = model.most_experts
        self._num_layers = max(len(blocks_of(stage)) for stage in model)

    def after_step(self, *, is_taken: bool = True) -> dict[str, float]:
        """Update biases of a step that is taken, reset counts and return the step's metrics; a collective.

        They are {} without experts.
        """
        if self._num_experts == 0:
            return {}
        load_LE, others = self._sum_over_ranks()
        for number, mixture in self._mixtures.items():
            # A router that is frozen, below an adapter, keeps its bias too.
            is_trained = any(parameter.requires_grad for parameter in mixture.router.parameters())
            if is_taken and is_trained and mixture.router.bias is not None:
                mixture.router.update_bias(load_LE[number])
            mixture.reset_statistics()
        return _metrics(np.array(load_LE.tolist()), np.array(others.tolist()))

    def _sum_over_ranks(self) -> tuple[Tensor, Tensor]:
        """Return load_LE and the columns of _OTHERS, over all ranks, zeros for layers without experts."""
        # Sums of integers are exact in float64, so equal under all layouts.
        table = torch.zeros(
            self._num_layers, self._num_experts + len(_OTHERS), dtype=torch.float64, device=self._device
        )
        for number, mixture in self._mixtures.items():
            table[number] = torch.cat([statistic.double() for statistic in mixture.statistics])
        if dist.get_world_size() > 1:
            dist.all_reduce(table)
        load_LE, others_LO = table.split([self._num_experts, len(_OTHERS)], dim=1)
        return load_LE, others_LO


def _metrics(load_LE: NDArray[np.float64], others_LO: NDArray[np.float64]) -> dict[str, float]:
    """Return the metrics by their names in metrics.jsonl; {} if no token was routed."""
    load_LE = load_LE[load_LE.sum(1) > 0]
    if not len(load_LE):
        # A traced stage without experts: fake tensors carry no counts of other stages.
        return {}
    skew_L = load_LE.max(1) / load_LE.mean(1)
    balance_loss, z_loss, num_forwards, padded_rows = others_LO.sum(0).tolist()
    metrics = {
        "router_skew": float(skew_L.max()),
        "router_skew_mean": float(skew_L.mean()),
        # Experts have no capacity limit.
        "tokens_dropped": 0.0,
        "tokens_padded": padded_rows / (padded_rows + float(load_LE.sum())),
    }
    # A loss with weight 0 is not computed; a computed one is never 0.
    losses = {"balance_loss": balance_loss, "z_loss": z_loss}
    return metrics | {name: total / num_forwards for name, total in losses.items() if total}
