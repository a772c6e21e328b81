"""HostUpdateCost: the optimizer's work on a host, as measured there."""

import math

import numpy as np

from meshwright.cost.communication.data_parallel import DataParallel
from meshwright.cost.constants import fixed_constant
from meshwright.cost.layout_table import Floats
from meshwright.cost.optimizer_update import NUM_ITERATIONS, Matrices, UpdateCost
from meshwright.cost.training_setup import Configurations
from meshwright.hardware.rates import matmul_rates, memory_op_rates
from meshwright.spec.machine.device import Device

_JOINED_CLIP = fixed_constant("joined_clip")


class HostUpdateCost(UpdateCost):
    """The same where the host itself computes."""

    is_asynchronous = False

    def __init__(self, configs: Configurations, parallel: DataParallel) -> None:
        super().__init__(configs, parallel)
        self._update_s = np.where(self.is_plain, _update_s(configs, parallel.updated), np.nan)

    def elementwise_s(self, bytes_per_s: Floats, passes: float) -> Floats:
        """Return the same, as measured where it was."""
        return np.where(np.isnan(self._update_s), super().elementwise_s(bytes_per_s, passes), self._update_s)

    def _orthogonalization_s(self, device: Device, matrices: Matrices) -> float:
        rate = matmul_rates(device, "float32")
        if rate is None:
            return math.nan
        short, long = matrices.sides
        products = ((short, short, long), (short, short, short), (short, long, short))
        return NUM_ITERATIONS * sum(2.0 * m * n * k / float(rate(*map(np.asarray, (m, n, k)))) for m, n, k in products)


def _update_s(configs: Configurations, num_parameters: Floats) -> Floats:
    """Return the seconds in which a rank clips and updates so many parameters; nan where that was not measured."""
    seconds = np.full(len(configs), np.nan)
    for position, setup in enumerate(configs.setups):
        (update, _), (clip, _) = (memory_op_rates(setup.cluster.device, op, "float32") for op in ("update", "clip"))
        if update is not None and clip is not None:
            here = configs.setup_index == position
            number = num_parameters[here]
            clips = _JOINED_CLIP if setup.stack.joins_update else 1.0
            seconds[here] = number / update(number) + clips * number / clip(number)
    return seconds
