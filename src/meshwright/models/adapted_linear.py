"""AdaptedLinear: a linear layer whose own weight is frozen, and whose low-rank update is trained ([adapter]).

    LoRA    y = W x + s B A x + b                  s = alpha / rank        Hu et al., arXiv:2106.09685, section 4.1
    DoRA    y = m (W x + s B A x) / |W + s B A| + b                        Liu et al., arXiv:2402.09353, equation 5

|.| is the norm of each row (of each output), of which no gradient is taken, as the authors do (section 4.3). Parameters
of the adapter are the layer's own, next to its weight, whose name stays what it was.

Shapes: O outputs, I inputs, R rank.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import ConfigError, UnsupportedError
from meshwright.models.contract import blocks_of
from meshwright.models.initial import Constant, Normal, fill
from meshwright.models.packed_weight import PackedWeight, PlainWeight, nf4_byte_values, pack, packed_shapes
from meshwright.models.rope import at_least_float32
from meshwright.spec.job.rules.adapter_rules import target_problems
from meshwright.spec.step.adapter import (
    ADAPTER_PARTS,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    PACKED_BLOCK,
    PACKED_SCALE,
    Adapter,
    BaseDType,
)

BYTE_VALUES = "byte_values"
"""How the name of a layer's buffer of what bytes of nf4 hold ends."""


class AdaptedLinear(nn.Linear):
    """A linear layer with a low-rank update."""

    lora_a: Tensor
    """A, [R, I]."""
    lora_b: Tensor
    """B, [O, R]."""
    magnitude: Tensor | None
    """m, [O]; None for LoRA."""
    scale: float
    dropout: float

    def forward(self, input: Tensor) -> Tensor:
        """Return the output; dropout is of what the update sees alone."""
        # Each is read once: ranks that share a layer gather it where it is read.
        frozen, a_RI, b_OR = self._frozen(), self.lora_a, self.lora_b
        dropped = F.dropout(input, self.dropout, self.training) if self.dropout else input
        # The frozen product last: recomputation stops at what the last operation keeps, and leaves that product out.
        output = F.linear(F.linear(dropped, a_RI) * self.scale, b_OR) + frozen.times(input)
        if self.magnitude is not None:
            norms_O = self._row_norms(frozen.whole(a_RI.dtype).detach(), a_RI, b_OR)
            output = output * (self.magnitude / norms_O).to(output.dtype)
        return output if self.bias is None else output + self.bias

    def _frozen(self) -> PlainWeight | PackedWeight:
        return PlainWeight(self.weight)

    def whole_rows(self, sums_O: Tensor) -> Tensor:
        """Return sums over all inputs from those over the inputs that this rank holds."""
        return sums_O

    @torch.no_grad()
    def _row_norms(self, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
        """Return |W + s B A|, [O], in float32 at least, without the product of B and A.

        |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b for a row w of W and its row b of B.
        """
        mixed_OR = at_least_float32(F.linear(weight_OI, a_RI)) * (2 * self.scale)
        a_RI, b_OR = at_least_float32(a_RI), at_least_float32(b_OR)
        mixed_OR = mixed_OR + (b_OR @ (a_RI @ a_RI.T)) * self.scale**2
        of_weight_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=a_RI.dtype).square()
        return self.whole_rows(of_weight_O + (mixed_OR * b_OR).sum(1)).sqrt()


class PackedAdaptedLinear(AdaptedLinear):
    """An adapted layer whose own weight has 8 or 4 bits (packed_weight.py)."""

    weight_scale: Tensor
    base_dtype: BaseDType = "int8"
    byte_values: Tensor | None
    """What bytes of nf4 hold: a buffer, as one that is made in forward is copied from the host in each use."""

    def _frozen(self) -> PackedWeight:
        return PackedWeight(self.weight, self.weight_scale, self.byte_values)

    @torch.no_grad()
    def store(self, stored: Tensor, scale: Tensor, weight_OI: Tensor) -> None:
        """Pack a weight, or a shard of whole blocks, into `stored` and `scale`, this layer's or their shards."""
        packed = pack(weight_OI, self.base_dtype)
        for own, new in zip((stored, scale), packed, strict=True):
            own.copy_(new)


def merged_weight(weight_OI: Tensor, adapter: Adapter, parts: dict[str, Tensor]) -> Tensor:
    """Return the weight of a plain layer that computes what an adapted one does, in float32 at least.

    `parts` are the layer's tensors by the ends of their names. Computed in float64; any rows of all of them will do.
    """
    lora_a, lora_b = parts[LORA_A].double(), parts[LORA_B].double()
    merged = weight_OI.double().addmm_(lora_b, lora_a, alpha=adapter.scale)
    if adapter.kind == "dora":
        norms_O = torch.linalg.vector_norm(merged, dim=1)
        merged = merged.mul_((parts[MAGNITUDE].double() / norms_O)[:, None])
    return merged.to(torch.promote_types(weight_OI.dtype, torch.float32))


def add_adapter(model: nn.Module, adapter: Adapter, seed: int) -> None:
    """Freeze `model` in place and adapt its layers; magnitudes are set once the weights are known.

    A and B of a model on the meta device stay without memory, as its own parameters do. Raises ConfigError for patterns
    of adapter.targets that match no linear layer of a block.
    """
    if not adapter.freezes_base:
        return
    layers = dict(_linear_layers(model))
    others = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
    if problems := [*target_problems(adapter, [*layers], [name for name in others if name not in layers])]:
        raise ConfigError("\n".join(problems))
    model.requires_grad_(False)
    for name in adapter.adapted(layers):
        _adapt(name, layers[name], adapter, seed)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Yield the adapted layers of `model`, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield name, module


@torch.no_grad()
def fill_byte_values(model: nn.Module) -> None:
    """Fill the buffers BYTE_VALUES of a model that got memory."""
    for _, layer in adapted_layers(model):
        if isinstance(layer, PackedAdaptedLinear) and layer.byte_values is not None:
            layer.byte_values.copy_(nf4_byte_values(layer.byte_values.dtype, layer.byte_values.device))


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of an adapter's parameters in `model`."""
    return [f"{name}.{part}" for name, layer in adapted_layers(model) for part in ADAPTER_PARTS if part in _own(layer)]


def initial_of_part(name: str, shape: torch.Size) -> Normal | Constant:
    """Return the initial values of an adapter's parameter: B is zero, and magnitudes until the weights are known.

    A has the variance of PEFT's uniform numbers between -1 / sqrt(I) and 1 / sqrt(I).
    """
    return Normal(1 / math.sqrt(3 * shape[1])) if name.endswith(f".{LORA_A}") else Constant(0.0)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for index, block in enumerate(blocks_of(model)):
        for name, module in block.named_modules(prefix=f"blocks.{index}"):
            if isinstance(module, nn.Linear):
                yield name, module


def _adapt(name: str, layer: nn.Linear, adapter: Adapter, seed: int) -> None:
    if type(layer) is not nn.Linear:
        raise UnsupportedError(
            f"{name} is a {type(layer).__name__}, and adapters are for layers of the class nn.Linear itself: leave it "
            "out of adapter.targets"
        )
    weight = layer.weight
    layer.__class__ = PackedAdaptedLinear if adapter.packs_base else AdaptedLinear
    assert isinstance(layer, AdaptedLinear)
    layer.scale, layer.dropout = adapter.scale, adapter.dropout
    _narrow(name, layer, adapter.base_dtype)
    layer.register_parameter(MAGNITUDE, None)
    for part, shape in adapter.parameter_shapes(layer.out_features, layer.in_features).items():
        parameter = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
        layer.register_parameter(part, parameter)
        if not parameter.is_meta:
            of_part = f"{name}.{part}"
            initial, origin = initial_of_part(of_part, parameter.shape), (0,) * parameter.dim()
            fill(parameter.data, initial, seed=seed, name=of_part, global_shape=shape, offsets=origin)


def _narrow(name: str, layer: AdaptedLinear, base_dtype: BaseDType) -> None:
    """Keep the frozen weight of a layer in `base_dtype`."""
    weight = layer.weight.detach()
    if base_dtype == "bfloat16":
        layer.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
    if not isinstance(layer, PackedAdaptedLinear):
        return
    if layer.in_features % PACKED_BLOCK:
        raise UnsupportedError(
            f'adapter.base_dtype = "{base_dtype}" has blocks of {PACKED_BLOCK} inputs, and {name} has '
            f'{layer.in_features}: leave it out of adapter.targets, or set adapter.base_dtype to "bfloat16"'
        )
    layer.base_dtype = base_dtype
    shape, dtype, num_blocks = packed_shapes(base_dtype, layer.out_features, layer.in_features)
    stored = torch.empty(shape, dtype=dtype, device=weight.device)
    scale = torch.empty(layer.out_features, num_blocks, dtype=torch.bfloat16, device=weight.device)
    if not weight.is_meta:
        layer.store(stored, scale, weight)
    layer.weight = nn.Parameter(stored, requires_grad=False)
    layer.register_parameter(PACKED_SCALE, nn.Parameter(scale, requires_grad=False))
    byte_values = nf4_byte_values(weight.dtype, weight.device) if base_dtype == "nf4" else None
    layer.register_buffer(BYTE_VALUES, byte_values, persistent=False)


def _own(layer: AdaptedLinear) -> dict[str, nn.Parameter]:
    return dict(layer.named_parameters(recurse=False))
