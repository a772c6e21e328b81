"""ModuleTracker names modules as they are entered, forwards and then backwards, and leaves no hook behind."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.parallelism.module_tracker import ModuleTracker
from meshwright.parallelism.pipeline.stages import Stages


def test_modules_are_noted_in_forward_and_in_backward() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stages = Stages({0: model}, (0,))
    with ModuleTracker(stages) as trail:
        out = stages[0](torch.ones(1, 2)).sum()
        forward = [name for _, name in trail.marks]
        out.backward()
    assert forward == ["0", "1"]
    assert [name for _, name in trail.marks[2:]] == ["1", "0"]
    assert sorted(trail.marks) == trail.marks
    model(torch.ones(1, 2))
    assert len(trail.marks) == 4
