"""A float8 layer on one rank is torchao's to the bit, and computes what a backward asks for only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallelism.torch_private.torch_compat import import_torchao

pytest.importorskip("torchao", reason="needs meshwright[torchao]", exc_type=ImportError)
torchao = import_torchao("torchao.float8", "this test")

from meshwright.parallelism.float8.float8_linear import LayoutFreeFloat8Linear  # noqa: E402 - after the import above

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def layer_of(recipe: str, kind: type[nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = type(config)(**{**vars(config), "emulate": True})
    model = torchao.convert_to_float8_training(nn.Sequential(nn.Linear(32, 48, bias=True)), config=config)
    if kind is not None:
        model[0].__class__ = kind
    return model.to(torch.bfloat16)


def step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    output = model(x)
    output.square().sum().backward()
    return [output, x.grad, model[0].weight.grad, model[0].bias.grad]  # type: ignore[index,list-item,union-attr]


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_rank_equals_torchao_to_the_bit(recipe: str) -> None:
    expected, found = step(layer_of(recipe)), step(layer_of(recipe, LayoutFreeFloat8Linear))
    for theirs, ours in zip(expected, found, strict=True):
        assert torch.equal(theirs, ours)


class _Matmuls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[_Matmuls]:
    with _Matmuls() as mode:  # type: ignore[no-untyped-call]
        yield mode


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_in_two_parts_repeats_no_matmul(recipe: str) -> None:
    model = layer_of(recipe, LayoutFreeFloat8Linear)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    # Of a view, as between layers: the engine is not asked about leaves.
    output = model(x.view_as(x)).sum()
    for wanted in (x, model[0].weight):  # type: ignore[index]
        with counted() as matmuls:
            torch.autograd.grad(output, wanted, retain_graph=True)
        assert matmuls.count == 1


@pytest.mark.slow
def test_a_compiled_part_may_begin_with_a_layer() -> None:
    # As where ring attention or experts, which stay eager, leave the compiler parts of a block.
    eager, part = layer_of("rowwise", LayoutFreeFloat8Linear), layer_of("rowwise", LayoutFreeFloat8Linear)
    compiled = torch.compile(part, backend="aot_eager", fullgraph=True)

    def compiled_step() -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        output = compiled(x)
        output.square().sum().backward()
        return [output, x.grad, part[0].weight.grad, part[0].bias.grad]  # type: ignore[index,list-item,union-attr]

    for theirs, ours in zip(step(eager), compiled_step(), strict=True):
        assert torch.equal(theirs, ours)
