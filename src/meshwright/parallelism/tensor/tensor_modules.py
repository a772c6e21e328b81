"""What a module's class becomes under tensor parallelism: its parameters read as parts, its forward shares a sequence.

Each class here is put before a module's own, so that what the module computes stays what its author wrote.

Shapes: B batch, S positions, D width, V this rank's rows of the vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.parallelism.collectives import gather, sum_scatter
from meshwright.parallelism.tensor.gather_again import GatherAgain, gather_compiled
from meshwright.parallelism.tensor.partial_sums import term_of_a_sum


class ReadsParts(nn.Module):
    """Its parameters are DTensors and read as this rank's parts of them, plain tensors."""

    tp_group: dist.ProcessGroup
    """The ranks that hold the other parts."""

    def part(self, name: str) -> Tensor:
        """Return what `self.<name>` reads as."""
        part: Tensor = cast(DTensor, self._parameters[name]).to_local()
        return part


class GathersInput(ReadsParts):
    """Its first input is a share of the sequence, and it computes on the whole."""

    gathers_again = False
    """Whether backward gathers the input again: not in a recomputed block, whose recomputation gathers it."""

    def forward(self, x_BSD: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole sequence."""
        if not self.gathers_again or not torch.is_grad_enabled():
            return super().forward(gather(x_BSD, 1, self.tp_group), *args, **kwargs)
        if torch.compiler.is_compiling():
            return super().forward(gather_compiled(x_BSD, 1, self.tp_group), *args, **kwargs)
        again = GatherAgain(x_BSD, 1, self.tp_group)
        with again.gathered() as gathered_BSD:
            output = super().forward(gathered_BSD, *args, **kwargs)
        again.start_after(output)
        return output


class GathersOutput(ReadsParts):
    """It computes on a share of the sequence, and returns the whole."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole sequence."""
        return gather(super().forward(*args, **kwargs), 1, self.tp_group)


class PartOfSum(ReadsParts):
    """A linear layer whose ranks' outputs add up to the whole one."""

    def part(self, name: str) -> Tensor:
        """Return the part of the weight; of the bias an n-th, since n ranks add it."""
        part = super().part(name)
        return part / self.tp_group.size() if name == "bias" else part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's term of the sum."""
        if torch.compiler.is_compiling():
            # The compiler keeps no term where its sum is kept.
            return super().forward(*args, **kwargs)
        with term_of_a_sum():
            return super().forward(*args, **kwargs)


class ScattersSum(ReadsParts):
    """Its ranks' outputs are terms of a sum, of which each rank keeps its share of the sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's share of the sequence, summed."""
        return sum_scatter(super().forward(*args, **kwargs), 1, self.tp_group)


class SumsOutput(ScattersSum, PartOfSum):
    """A linear layer whose ranks' outputs are summed."""


class GathersInputSumsOutput(GathersInput, ScattersSum):
    """It computes a part of the output for the whole sequence."""


class SharesHeads(ReadsParts):
    """It holds a part of one head and computes the whole head, as do the other ranks whose queries attend to it."""

    head_group: dist.ProcessGroup
    """The ranks that share the head."""

    def part(self, name: str) -> Tensor:
        """Return the whole head; backward sums its gradient over the ranks that share it."""
        return gather(super().part(name), 0, self.head_group)


class LooksUpOwnRows(ReadsParts):
    """An embedding with some of the vocabulary's rows: tokens of other rows are 0 here, and added by other ranks."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return x_BSD for this rank's share of the sequence."""
        weight_VD = self.part("weight")
        num_rows = weight_VD.shape[0]
        row_BS = tokens_BS - self.tp_group.rank() * num_rows
        is_elsewhere_BS = (row_BS < 0) | (row_BS >= num_rows)
        x_BSD = F.embedding(row_BS.masked_fill(is_elsewhere_BS, 0), weight_VD)
        return sum_scatter(x_BSD.masked_fill(is_elsewhere_BS[..., None], 0.0), 1, self.tp_group)


def change_class(module: nn.Module, behaviour: type[ReadsParts], tp_group: dist.ProcessGroup) -> None:
    """Put `behaviour` before the class of `module`, in place."""
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    module.__class__ = _joined(behaviour, type(module), names)  # type: ignore[arg-type]
    module.tp_group = tp_group  # type: ignore[assignment]


@functools.cache
def _joined(behaviour: type[ReadsParts], own: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    # Cached: the same class for the same module of every block, or torch.compile would compile each block again.
    parts = {name: property(functools.partial(_read, name=name)) for name in names}
    return type(f"{behaviour.__name__}{own.__name__}", (behaviour, own), parts)


def _read(module: ReadsParts, name: str) -> Tensor | None:
    parameter = module._parameters[name]
    # Between forwards FSDP2 holds shards, and looks for them under the same name.
    return parameter if _is_sharded(parameter) else module.part(name)


def _is_sharded(parameter: Tensor | None) -> bool:
    axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return bool(axes) and not {"fsdp", "expert_dp_shard"}.isdisjoint(axes or ())
