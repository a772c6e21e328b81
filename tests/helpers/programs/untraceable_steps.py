"""Steps that cannot be traced, each for another reason: (device, rank, world_size, reason) -> step."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist


@torch.library.custom_op("untraceable::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    """Return half of `x`; nobody said what shape that has."""
    return x / 2


def _objects(x: Tensor) -> Tensor:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rows": len(x)})
    return x


REASONS: dict[str, Callable[[Tensor], Tensor]] = {
    "size": lambda x: x[: int((x > 0).sum())],
    "list": lambda x: torch.cat([x[:n] for n in (x > 0).sum(1).tolist()]),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "kernel": halve,
    "objects": _objects,
    "memory": lambda x: torch.from_numpy(x.detach().cpu().numpy()),
    "mistake": lambda x: x @ x,
}


class Inner(nn.Module):
    """Does what cannot be traced."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.does = REASONS[reason]

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


class Outer(nn.Module):
    """Has a module that does."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), Inner(reason))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def build(device: torch.device, rank: int, world_size: int, reason: str) -> Callable[[], None]:
    """Return a step that runs a model whose module `layers.1` does what cannot be traced."""
    with device:
        model = Outer(reason)

    def step() -> None:
        model(torch.zeros(4, 6, device=device))

    return step


def without_compiler(device: torch.device, rank: int, world_size: int) -> Callable[[], None]:
    """Return a step with a compiled module, after a part of torch's compiler has gone, as in a torch of tomorrow."""
    sys.modules["torch._inductor.graph"] = None  # type: ignore[assignment]
    with device:
        model = nn.Linear(6, 6)
    model.compile()
    return lambda: None
