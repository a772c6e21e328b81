"""A model that cannot be split over ranks is refused in its own terms."""

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.contract import require_shardable
from meshwright.models.initial import Constant, Normal


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 4)


def test_ties_within_a_unit_and_buffers_are_fine() -> None:
    model = Plain()
    model.head.weight = model.stem.weight
    model.blocks[0][0].weight = model.blocks[0][1].weight
    model.register_buffer("table", torch.zeros(3, dtype=torch.int64))
    require_shardable(model)


def test_other_formats_than_float32_are_refused() -> None:
    model = Plain()
    model.blocks[0].to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"Plain holds blocks\.0\.0\.weight, .* in torch\.bfloat16"):
        require_shardable(model)


def test_a_parameter_without_a_dim_is_refused() -> None:
    model = Plain()
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match="holds scale without a dim"):
        require_shardable(model)


@pytest.mark.parametrize("case", ["two blocks", "block and head", "one block twice"])
def test_a_parameter_shared_between_units_is_refused(case: str) -> None:
    model = Plain()
    if case == "two blocks":
        model.blocks[1][0].weight = model.blocks[0][0].weight
    elif case == "block and head":
        model.head.weight = model.blocks[0][0].weight
    else:
        model.blocks[1] = model.blocks[0]
    with pytest.raises(ConfigError, match=r"one parameter as blocks\.0\.0\.weight and (blocks\.1\.0|head)\.weight"):
        require_shardable(model)


class SaysInitial(Plain):
    def initial(self, fqn: str) -> Normal | Constant:
        return Constant(0.0) if fqn == "count" else Normal(0.02)


def test_buffers_that_nothing_would_fill_are_refused() -> None:
    with torch.device("meta"):
        model = SaysInitial()
        model.register_buffer("count", torch.zeros(3))
        require_shardable(model)
        model.register_buffer("table", torch.ones(3))
    with pytest.raises(ConfigError, match=r"has initial.* keeps table as buffers"):
        require_shardable(model)
