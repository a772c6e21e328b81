"""All-gathers of float8 weights in FSDP2 and HSDP, a quarter of the bytes of float32 and half of those of bfloat16.

A rank rounds its shard of the master weight, and a weight's scale is of the whole weight: before each step the largest
magnitudes of all weights are reduced over the ranks that hold shards, in one all-reduce for each axis. Tensorwise only:
FSDP2 shards rows, and a scale along rows would need all of them.
"""

from importlib import import_module
from typing import Any

from torch import nn

from meshwright.parallelism.collectives import all_reduce_max
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.tensor.layers import SharedHeadLinear

_AXES = ("fsdp", "tp")


class Float8Gathers:
    """The weights of this rank's stages that are gathered in float8."""

    def __init__(self, stages: nn.Module, meshes: Meshes) -> None:
        """Gather weights of `stages` in float8 from now on; call when the shards are on their device.

        Weights of key and value heads that tensor-parallel ranks share are not: a second all-gather completes them.
        """
        self._meshes, layout = meshes, meshes.layout
        if layout.cpu_offload or isinstance(layout.reshard_after_forward, int):
            # Refused for tensorwise (spec/job/rules/float8_rules.py), but it may replace a recipe that a device lacks.
            self._gathers = []
            return
        layers = [module for module in stages.modules() if getattr(module, "scales_whole_weight", False)]
        hooks = [_torch().gather_in_float8(layer) for layer in layers if not isinstance(layer, SharedHeadLinear)]
        self._gathers = [one for one in hooks if one is not None]

    def update_scales(self) -> None:
        """Set the scales of the weights as they are; a collective. Call after they have changed."""
        if not self._gathers:
            return
        amax = _torch().largest_magnitudes(self._gathers)
        for axis in _AXES:
            amax = all_reduce_max(amax, self._meshes.group(axis))
        _torch().set_scales(self._gathers, amax)


def _torch() -> Any:
    # Imported when it is needed: it imports torchao, an extra.
    return import_module("meshwright.parallelism.torch_private.torch_float8_gather")
