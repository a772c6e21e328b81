"""A model's parameter that does not lie row by row in memory is sharded as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallelism.data.fully_sharded import set_gradient_sync, shard_model
from meshwright.parallelism.graph.graph_sharded import shard_in_graph
from meshwright.parallelism.mesh import build_meshes
from meshwright.spec.job.sections import PrecisionSection
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks

WIDTH = 6


class Transposed(nn.Module):
    """A transposed parameter in a block, and one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.blocks[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.first.weight = self.last.weight = nn.Parameter(torch.randn(WIDTH, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh() @ self.first.weight
        output: Tensor = self.last(self.blocks[0](h).tanh())
        return output


def samples(rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def backward(model: nn.Module, rank: int) -> float:
    """Return the loss of one rank's samples, after a backward pass."""
    loss: Tensor = model(samples(rank)).square().mean()
    loss.backward()
    return loss.item()


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters after steps of an optimizer that goes through memory, not through indices."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, fused=True)
    for _ in range(2):
        optimizer.step()
    return {name: whole(parameter).detach() for name, parameter in parameters.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_step(in_graph: bool) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return this rank's loss, and the whole gradients and parameters afterwards."""
    layout = Layout(dp_shard=2)
    meshes = build_meshes(layout, "cpu")
    model = Transposed().to(torch.float64)
    precision = PrecisionSection(compute="float64")
    if in_graph:
        shard_in_graph(model, precision, meshes, sums_replicas=True)
    else:
        shard_model(model, layout, precision, meshes)
    set_gradient_sync(model, layout, reduces=True, is_last=True, waits=True)
    loss = backward(model, meshes.dp_rank)
    gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return loss, gradients, trained(model)


@pytest.mark.parametrize("in_graph", [False, True])
def test_transposed_parameters_train_sharded_as_in_one_process(in_graph: bool) -> None:
    model = Transposed().to(torch.float64)
    assert not model.first.weight.is_contiguous()
    losses = [backward(model, rank) for rank in range(2)]
    gradients = {name: each.grad for name, each in model.named_parameters()}
    after = trained(model)
    for rank, (loss, its_gradients, its_parameters) in enumerate(run_ranks(sharded_step, 2, in_graph)):
        torch.testing.assert_close(loss, losses[rank], rtol=1e-12, atol=0)
        # The same names: what is tied stays so.
        torch.testing.assert_close(its_gradients, gradients)
        torch.testing.assert_close(its_parameters, after)


def shapes_on_meta() -> list[tuple[tuple[int, ...], bool]]:
    layout = Layout(dp_shard=2)
    with torch.device("meta"):
        model = Transposed()
    shard_model(model, layout, PrecisionSection(), build_meshes(layout, "cpu"))
    return [(tuple(parameter.shape), parameter.is_contiguous()) for parameter in model.parameters()]


def test_transposed_parameters_without_memory_are_sharded() -> None:
    shapes = [(tuple(parameter.shape), True) for parameter in Transposed().parameters()]
    assert run_ranks(shapes_on_meta, 2) == [shapes, shapes]
