"""OuterOptimizer: SGD with Nesterov momentum on the mean change that replicas made to the parameters (DiLoCo).

    gradient = outer parameters - mean of the replicas' parameters
    momentum = outer_momentum x momentum + gradient
    outer parameters -= outer_learning_rate x (gradient + outer_momentum x momentum)

as torch.optim.SGD(nesterov=True) does it. Where a rank's shard of a parameter is, there are its outer parameters and
momentum, so the outer optimizer needs no communication but the sum over replicas, and is saved and resharded as any
other state. Parameters are in fragments (Streaming DiLoCo), which are summed and updated one at a time.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, copies_by_name, local_box
from meshwright.spec.job.replicas_section import ReplicasSection

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OuterOptimizer:
    """The outer parameters and momentum of one rank's shards."""

    def __init__(self, model: nn.Module, section: ReplicasSection) -> None:
        """Start from the parameters as they are, in the same fragments on all ranks; a collective."""
        trainable = [(name, each) for name, each in canonical_parameters(model) if each.requires_grad]
        self._section = section
        self._copies = copies_by_name(trainable)
        self._parameters = {name: copies[0].detach().clone() for name, copies in self._copies.items()}
        self._momenta = {name: torch.zeros_like(tensor) for name, tensor in self._parameters.items()}
        sizes = _gathered({name: tensor.numel() for name, tensor in self._parameters.items()})
        self.fragments = [[name for name in names if name in self._copies] for names in split(sizes, section.fragments)]
        """Names of this rank's parameters by fragment."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the outer parameter and momentum by name of parameter; loading into them in place restores both."""
        return {
            name: {"parameter": parameter, "momentum": self._momenta[name]}
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the parameters as they are, without momentum."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self._copies[name][0])
            self._momenta[name].zero_()

    def local(self, fragment: int) -> list[Tensor]:
        """Return this replica's own parameters in a fragment: their memory, not copies."""
        return [local_box(self._copies[name][0].detach())[0] for name in self.fragments[fragment]]

    @torch.no_grad()
    def change(self, fragment: int, local: Sequence[Tensor]) -> Tensor:
        """Return outer minus `local` parameters, flat, on the host, in replicas.outer_dtype."""
        dtype = _DTYPES[self._section.outer_dtype]
        outer = [local_box(self._parameters[name])[0] for name in self.fragments[fragment]]
        flat = [(one - other).reshape(-1).to("cpu", dtype) for one, other in zip(outer, local, strict=True)]
        return torch.cat(flat) if flat else torch.empty(0, dtype=dtype)

    @torch.no_grad()
    def update(self, fragment: int, local: Sequence[Tensor], mean_change: Tensor | None, kept_share: float) -> None:
        """Take a step by the `mean_change` of all replicas, and let parameters keep `kept_share` of what they are.

        A replica that is alone has no `mean_change`: the mean is its `local` parameters, to the bit.
        """
        offset, section = 0, self._section
        for name, own in zip(self.fragments[fragment], local, strict=True):
            outer, momentum = local_box(self._parameters[name])[0], local_box(self._momenta[name])[0]
            if mean_change is None:
                mean, gradient = own, outer - own
            else:
                flat = mean_change[offset : offset + outer.numel()]
                gradient = flat.to(outer.device, outer.dtype).view_as(outer)
                mean = outer - gradient
            offset += outer.numel()
            momentum.mul_(section.outer_momentum).add_(gradient)
            # Not outer - rate x gradient, which with a rate of 1 is not the mean to the bit.
            outer.copy_(torch.lerp(outer, mean, section.outer_learning_rate))
            outer.sub_(momentum, alpha=section.outer_learning_rate * section.outer_momentum)
            for copy in self._copies[name]:
                parameter = local_box(copy.detach())[0]
                parameter.copy_(outer if kept_share == 0 else torch.lerp(outer, parameter, kept_share))


def split(sizes: Mapping[str, int], num_fragments: int) -> list[list[str]]:
    """Return the names in so many fragments of about equal size, the same for any order of names.

    The largest first, each into the smallest fragment so far: equal matrices of consecutive blocks are dealt out in
    turn.
    """
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    totals = [0] * num_fragments
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = totals.index(min(totals))
        fragments[smallest].append(name)
        totals[smallest] += sizes[name]
    return fragments


def _gathered(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes of the whole model's parameters, of which a pipeline's ranks have parts; a collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sizes
    parts: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, sizes)
    return {name: size for part in parts for name, size in part.items()}
