"""PackedShards: this rank's shards of frozen weights in 8 or 4 bits, filled from shards of the weights themselves."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.models.adapted_linear import PackedAdaptedLinear, adapted_layers
from meshwright.models.packed_weight import elements_of, unpack
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_fqn, local_box
from meshwright.spec.step.adapter import PACKED_BLOCK, PACKED_SCALE

_WEIGHT = "weight"


class PackedShards:
    """The packed weights of a model or of its stages, by the names of the weights."""

    def __init__(self, model: nn.Module) -> None:
        stages = model if isinstance(model, Stages) else [model]
        layers = ((canonical_fqn(name), layer) for stage in stages for name, layer in adapted_layers(stage))
        named = {name: layer for name, layer in layers if isinstance(layer, PackedAdaptedLinear)}
        self._layers = {f"{name}.{_WEIGHT}": layer for name, layer in named.items()}
        self.scales = {f"{name}.{PACKED_SCALE}" for name in named}
        """Names of their scales, which are filled with them."""

    def __contains__(self, name: object) -> bool:
        return name in self._layers

    def shape(self, name: str) -> tuple[int, int]:
        """Return the shape of the whole weight."""
        return self._layers[name].out_features, self._layers[name].in_features

    def empty(self, name: str, device_type: str) -> tuple[Tensor, Sequence[int]]:
        """Return memory for this rank's shard of the weight, and the offset of its first element in each dim."""
        stored, _, (row, column) = self._shards(name)
        each = elements_of(stored)
        wide = torch.empty(stored.shape[0], stored.shape[1] * each, device=device_type)
        return wide, (row, column * each)

    def shard_of(self, name: str, whole_OI: Tensor) -> Tensor:
        """Return this rank's shard of a whole weight."""
        stored, _, (row, column) = self._shards(name)
        each = elements_of(stored)
        columns = slice(column * each, (column + stored.shape[1]) * each)
        return whole_OI[row : row + stored.shape[0], columns]

    def store(self, name: str, shard: Tensor) -> None:
        """Pack this rank's shard of the weight, of whole blocks."""
        stored, scale, _ = self._shards(name)
        if stored.numel():
            self._layers[name].store(stored, scale, shard)

    def _shards(self, name: str) -> tuple[Tensor, Tensor, Sequence[int]]:
        return packed_shards_of(self._layers[name])


def packed_shards_of(layer: PackedAdaptedLinear) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Return this rank's shard of what is stored, its scales, and the offset of the former in each dim."""
    weight, scale = layer._parameters[_WEIGHT], layer._parameters[PACKED_SCALE]
    assert weight is not None
    assert scale is not None
    (stored, offsets), (scales, first) = local_box(weight), local_box(scale)
    # Shards of the two are cut at the same elements.
    assert (offsets[0], offsets[1] * elements_of(stored)) == (first[0], first[1] * PACKED_BLOCK)
    return stored, scales, offsets


def weight_shard(layer: PackedAdaptedLinear) -> Tensor:
    """Return this rank's shard of the weight, unpacked in float32."""
    stored, scales, _ = packed_shards_of(layer)
    return unpack(stored, scales, torch.float32)
