"""HostStepPricer: a step where kernels run on the host's own cores, as measured there.

    microbatch = sum over blocks (matmul + attention + memory [+ recompute] + tp, cp, ep + the host's own seconds)
    step       = microbatches x slowest stage + bubble + sends + exchanges of shards and replicas + optimizer

Nothing overlaps: one core prepares, computes and communicates. What FSDP copies, and what launches kernels, is part of
what was measured (measured_op.py, measured_sharding.py).
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.arrays import Floats, Passes
from meshwright.cost.block_positions import BlockPosition
from meshwright.cost.calibrated.measured_sharding import measured_exchanges_s
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.compute.block_compute import Prices
from meshwright.cost.constants import Constants
from meshwright.cost.step import StepPricer
from meshwright.cost.training_setup import Configurations


class HostStepPricer(StepPricer):
    """Prices configurations whose devices are hosts."""

    def __init__(self, configs: Configurations) -> None:
        super().__init__(configs)
        never = np.zeros(len(configs), np.bool_)
        self.traffic.contends = never
        self.compute.makes_tables = never
        # The host has flash attention for 32 bits, too.
        self.compute.split_attention.has_wide_pieces = never

    def _copies_s(self, position: BlockPosition, prices: Prices) -> Passes:
        return self._none(), self._none()

    def _fsdp_s(self, position: BlockPosition, prices: Prices, busy: Passes, whole: Passes) -> Passes:
        return self._none(), self._none()

    def _wait_s(self, device_s: Floats, host_s: Floats, c: Constants) -> Floats:
        return host_s

    def _exchanges_s(self, fabric: Fabric, c: Constants, hidden_behind_s: Floats) -> Floats:
        return measured_exchanges_s(self.parallel, self.positions, fabric)

    def _fixed_s(self, c: Constants) -> Floats:
        return self._none()

    def _none(self) -> Floats:
        return np.zeros(len(self.configs))
