"""Marks of modules in profiles, eager and compiled, in the order of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from meshwright.parallelism.torch_private.torch_module_marks import mark_calls


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class MarkedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubled() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_marks_follow_modules_through_forward_and_backward(is_compiled: bool) -> None:
    model, x = MarkedNet(), torch.ones(2, 4, requires_grad=True)
    for block in model.blocks if is_compiled else ():
        block.compile(backend="eager", fullgraph=True)
    mark_calls(model)
    model(x).backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(x).backward()
    marks = [event for event in found.events() or () if event.name.startswith("module::")]
    marks.sort(key=lambda event: event.time_range.start)
    assert [event.name.removeprefix("module::") for event in marks] == [
        "pre_forward ()",
        "pre_forward (blocks.0)",
        "post_forward (blocks.0)",
        "pre_forward (blocks.1)",
        "post_forward (blocks.1)",
        "post_forward ()",
        "pre_backward ()",
        "pre_backward (blocks.1)",
        "pre_backward (blocks.0)",
        "post_backward (blocks.0)",
    ]
