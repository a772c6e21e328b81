"""Stages: what one rank holds of a model, cut into the stages of a pipeline.

A stage is the same model with the other stages' parts set to None, so its parameters keep their names and its forward
needs no second version. Without a pipeline there is one stage, which is the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from meshwright.errors import UnsupportedError
from meshwright.models.contract import blocks_of
from meshwright.spec.layout import V_SCHEDULES, Layout


class Stages(nn.Module):
    """This rank's stages by number, of `num_stages` in all."""

    def __init__(self, stages: Mapping[int, nn.Module], num_stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self.num_stages = num_stages

    def __getitem__(self, number: int) -> nn.Module:
        return self.stages[str(number)]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.stages.values())

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of this rank's stages, ascending."""
        return [int(number) for number in self.stages]

    def is_last(self, number: int) -> bool:
        """Return whether a stage is the one that computes the loss."""
        return number == self.num_stages - 1


def stage_numbers(layout: Layout, pp_rank: int) -> list[int]:
    """Return the stages that a pipeline rank holds, ascending: r and its mirror image in a V, else r, r + pp, ..."""
    if layout.schedule in V_SCHEDULES:
        return [pp_rank, layout.num_stages - 1 - pp_rank]
    return list(range(pp_rank, layout.num_stages, layout.pp))


def split(model: nn.Module, layout: Layout, pp_rank: int) -> Stages:
    """Return this pipeline rank's stages of `model`, cut at layout.stage_boundaries; `model` is used up.

    Raises UnsupportedError for a model that does not say which of its parts are the first and the last.
    """
    if layout.pp == 1:
        return Stages({0: model}, 1)
    require_stages(model)
    assert layout.stage_boundaries is not None, "the boundaries are chosen before the model is split"
    numbers = stage_numbers(layout, pp_rank)
    copies = [copy.deepcopy(model) for _ in numbers[1:]]
    return Stages(
        {
            number: _cut(stage, number, layout.stage_boundaries)
            for number, stage in zip(numbers, [model, *copies], strict=True)
        },
        layout.num_stages,
    )


def require_stages(model: nn.Module) -> None:
    """Raise UnsupportedError unless `model` says how it is cut into stages."""
    missing = [name for name in ("first_parts", "last_parts", "stage_width") if not hasattr(model, name)]
    if missing or not len(blocks_of(model)):
        what = " and ".join(missing) or "blocks"
        raise UnsupportedError(
            f"layout.pp > 1 cuts a model between its blocks, but {type(model).__name__} has no {what}: "
            "add them as models/contract.py says, or set layout.pp to 1"
        )


def shared_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the parts that both the first and the last stage hold, such as an embedding that is the head too."""
    first, last = getattr(model, "first_parts", ()), getattr(model, "last_parts", ())
    return tuple(part for part in first if part in last)


def _cut(model: Any, number: int, boundaries: Sequence[int]) -> Any:
    blocks = blocks_of(model)
    starts = [0, *boundaries, len(blocks)]
    kept = range(starts[number], starts[number + 1])
    for index in range(len(blocks)):
        if index not in kept:
            blocks[index] = None  # type: ignore[assignment]
    is_first, is_last = number == 0, number == len(boundaries)
    parts = set(model.first_parts if is_first else ()) | set(model.last_parts if is_last else ())
    for part in {*model.first_parts, *model.last_parts} - parts:
        setattr(model, part, None)
    return model
