"""Parameters that a loss does not reach get zeros; those that no rank's loss reaches are distinguished from others."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.parallelism.data.missing_gradients import complete_gradients, unused_everywhere
from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.spec.layout.layout import Layout
from run_ranks import run_ranks


def left_out() -> tuple[list[str], list[str]]:
    """Return which parameters have gradients of zero, and which have none."""
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "left": nn.Linear(2, 1), "frozen": nn.Linear(2, 1)})
    model["frozen"].requires_grad_(False)
    model["used"](torch.ones(1, 2)).sum().backward()
    stages = Stages({0: model}, (0,))
    complete_gradients(stages, build_meshes(Layout(), "cpu"))
    assert stages.missing == {*model["left"].parameters()}
    named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    zeros = [name for name, gradient in named if gradient is not None and not gradient.any()]
    return zeros, [name for name, gradient in named if gradient is None]


def test_what_the_loss_does_not_reach_gets_zeros() -> None:
    found = run_ranks(left_out, 1)
    assert found == [(["left.weight", "left.bias"], ["frozen.weight", "frozen.bias"])]


def unused(users: tuple[int, ...]) -> list[bool]:
    """Return of parameters, which the ranks of these numbers use, whether no rank does."""
    meshes = build_meshes(Layout(dp_replicate=2), "cpu")
    rank = meshes.rank("dp_replicate")
    parameters = [nn.Parameter(torch.ones(2)) for _ in users]
    missing = {parameter for parameter, user in zip(parameters, users, strict=True) if user != rank}
    found = unused_everywhere(parameters, missing, meshes)
    return [parameter in found for parameter in parameters]


def test_what_any_rank_uses_is_used() -> None:
    assert run_ranks(unused, 2, (0, 1, 2)) == [[False, False, True]] * 2
