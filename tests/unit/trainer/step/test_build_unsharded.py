"""What every rank builds for itself is the same."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.spec.job.job import Job
from meshwright.trainer.step.build_pipeline import build_unsharded


class Drawn(nn.Module):
    """Draws its weights from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        numbers = [float(torch.rand(())), float(np.random.rand()), random.random()]
        self.weight = nn.Parameter(torch.tensor(numbers, dtype=torch.float32))


def test_a_users_weights_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    job = Job.from_dict({"model": {"source": "test_build_unsharded:Drawn"}})
    one, other = (build_unsharded(job).get_parameter("weight") for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, build_unsharded(job.replace(train={"seed": 1})).get_parameter("weight"))
