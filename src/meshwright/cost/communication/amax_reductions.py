"""What our float8 layers exchange: largest magnitudes (amax) of tensors that tp and cp ranks hold shards of.

    tp    forward the inputs of row-parallel layers, backward the gradients of column-parallel ones; rowwise also what
          of the weight is summed over
    cp    tensorwise inputs forward and gradients backward; rowwise both backward, where the sum is over tokens

A number of 4 bytes for a tensor or, rowwise, for a token: an all-reduce each, which nothing hides. None in MXFP8, whose
blocks of 32 elements lie on one rank each. Source: parallelism/float8/float8_linear.py. Ignored: that of all weights
once a step; amax of a row of a weight for that of a token.
"""

import numpy as np

from meshwright.cost.blocks.block_table import BlockTable
from meshwright.cost.communication.collective import RankGroup, all_reduce_s
from meshwright.cost.communication.fabric import Fabric
from meshwright.cost.layout_table import Floats, Ints, Passes
from meshwright.cost.training_setup import Configurations

_BYTES = 4.0


class AmaxReductions:
    """Prices them, one element a configuration."""

    def __init__(self, configs: Configurations, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._has_amax = configs.has(lambda setup: setup.own_float8 != "mxfp8")
        self._is_tensorwise = configs.has(lambda setup: setup.own_float8 == "float8-tensorwise")

    def over_tp(self, row: Ints, group: RankGroup, fabric: Fabric) -> Passes:
        """Return the seconds of one block, forward and backward."""
        low = self._blocks.num_low_matmuls[row]
        rows = np.minimum(self._blocks.num_tp_inputs[row], low)
        # Rowwise weights are scaled in each pass, along what is sharded in one of both.
        return self._times(rows, row, group, fabric), self._times(low - rows, row, group, fabric)

    def over_cp(self, row: Ints, group: RankGroup, fabric: Fabric) -> Passes:
        """Return the seconds of one block, forward and backward."""
        low = self._blocks.num_low_matmuls[row]
        forward = np.where(self._is_tensorwise, low, 0.0)
        return self._times(forward, row, group, fabric), self._times(low, row, group, fabric)

    def _times(self, number: Floats, row: Ints, group: RankGroup, fabric: Fabric) -> Floats:
        if not np.any(number > 0):
            return np.zeros(len(row))
        number = np.where(self._has_amax, number, 0.0)
        each = np.where(self._is_tensorwise, 1.0, 2.0)
        num_bytes = _BYTES * np.where(self._is_tensorwise, 1.0, self._blocks.tokens[row])
        return np.where(number > 0, number * each * all_reduce_s(num_bytes, group, fabric), 0.0)
