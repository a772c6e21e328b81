"""Stages: this rank's parts of a model that is split into pipeline stages.

A stage is the same model with the other stages' parts set to None, so that parameters keep their names and forward
needs no second version. Without a pipeline the only stage is the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshwright.errors import UnsupportedError
from meshwright.models.contract import blocks_of
from meshwright.models.moe import most_experts
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.action import Action
from meshwright.spec.layout.schedule.schedule import Schedule

if TYPE_CHECKING:
    from meshwright.memory.memory_pools import MemoryPools
    from meshwright.parallelism.data.replica_sums import ReplicaSums
    from meshwright.parallelism.exact_sums import FixedPoint
    from meshwright.parallelism.float8.convert_linears import Float8Report


class Stages(nn.Module):
    """This rank's stages, by number."""

    def __init__(self, stages: Mapping[int, nn.Module], rank_of_stage: Sequence[int], most_experts: int = 0) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self.rank_of_stage = rank_of_stage
        """The pipeline rank of each stage, over all ranks."""
        self.most_experts = most_experts
        """The largest number of experts of a layer in any stage of any rank."""
        self.float8: Float8Report | None = None
        """What became of linear layers where the job asks for float8."""
        self.pools: MemoryPools | None = None
        """The memory pools that serve it and its optimizer."""
        self.replica_sums: ReplicaSums | None = None
        """What sums the gradients of the only stage over dp_replicate, where FSDP2 does not."""
        self.missing: set[nn.Parameter] = set()
        """Those that no backward of the last step gave a gradient here: it is zero (missing_gradients.py)."""
        self.updates_in_backward = False
        """Whether backward uses up gradients, so that those that are not there are not missing."""
        self.loss_format: FixedPoint | None = None
        """What losses are rounded to before they are summed, where sums are exact (exact_sums.py)."""
        self.sums_replicas_after = False
        """Whether gradients are summed over dp_replicate at the end of a step, not in backward."""

    def __getitem__(self, number: int) -> nn.Module:
        return self.stages[str(number)]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.stages.values())

    @property
    def num_stages(self) -> int:
        """Return the number of stages over all ranks."""
        return len(self.rank_of_stage)

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of this rank's stages, ascending."""
        return [int(number) for number in self.stages]

    @property
    def last(self) -> nn.Module | None:
        """Return the stage that computes the loss, None if another rank has it."""
        return next((self[number] for number in self.numbers if self.is_last(number)), None)

    def begin_replica_sums(self) -> None:
        """Sum gradients over replicas in the next backward, the last of a step, if that is left to `replica_sums`."""
        if self.replica_sums is not None:
            self.replica_sums.begin()

    def end_replica_sums(self) -> None:
        """Wait for these sums; a collective."""
        if self.replica_sums is not None:
            self.replica_sums.end()

    def summand(self, loss: Tensor) -> Tensor:
        """Return what a loss adds to the sum over microbatches and ranks, in float64: rounded where sums are exact."""
        if self.loss_format is None:
            return loss
        rounded = loss.to(torch.float64, copy=True)
        self.loss_format.round_([rounded])
        return rounded

    def is_last(self, number: int) -> bool:
        """Return whether a stage computes the loss."""
        return number == self.num_stages - 1


def split(model: nn.Module, layout: Layout, schedule: Schedule, pp_rank: int) -> Stages:
    """Return a rank's stages of `model` under `schedule`, split at layout.stage_boundaries; consumes `model`.

    Raises UnsupportedError for a model without first_parts, last_parts or stage_width.
    """
    # Of the whole model: this rank's stages may have no experts.
    experts = most_experts(model)
    if layout.pp == 1:
        return Stages({0: model}, (0,), experts)
    require_stages(model)
    assert layout.stage_boundaries is not None, "the boundaries are chosen before the model is split"
    cutter = _Cutter(model, layout.stage_boundaries)
    return Stages(
        {number: cutter.stage(number) for number in schedule.stages_of_rank(pp_rank)},
        tuple(schedule.rank_of_stage(number) for number in range(schedule.num_stages)),
        experts,
    )


def require_stages(model: nn.Module) -> None:
    """Raise UnsupportedError unless `model` can be split into stages."""
    missing = [name for name in ("first_parts", "last_parts", "stage_width") if not hasattr(model, name)]
    if missing or not len(blocks_of(model)):
        what = " and ".join(missing) or "blocks"
        raise UnsupportedError(
            f"layout.pp > 1 splits a model between its blocks, but {type(model).__name__} has no {what}: "
            "add them (see models/contract.py), or set layout.pp to 1"
        )


def shared_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the parts that both the first and the last stage hold, such as a tied embedding."""
    first, last = getattr(model, "first_parts", ()), getattr(model, "last_parts", ())
    return tuple(part for part in first if part in last)


class _Cutter:
    """Splits a model; a stage copies no blocks of other stages."""

    def __init__(self, model: Any, boundaries: Sequence[int]) -> None:
        blocks = blocks_of(model)
        self._blocks = list(blocks)
        self._starts = [0, *boundaries, len(blocks)]
        self._first, self._last = tuple(model.first_parts), tuple(model.last_parts)
        self._parts = {name: getattr(model, name) for name in {*self._first, *self._last}}
        for index in range(len(blocks)):
            blocks[index] = None  # type: ignore[assignment]
        for name in self._parts:
            setattr(model, name, None)
        self._empty = model

    def stage(self, number: int) -> Any:
        """Return a stage, with the model's own blocks."""
        stage: Any = copy.deepcopy(self._empty)
        for index in range(self._starts[number], self._starts[number + 1]):
            blocks_of(stage)[index] = self._blocks[index]
        is_first, is_last = number == 0, number == len(self._starts) - 2
        for name in {*(self._first if is_first else ()), *(self._last if is_last else ())}:
            # Copied: the first and the last stage may be on one rank.
            setattr(stage, name, copy.deepcopy(self._parts[name]))
        return stage


@dataclass(frozen=True)
class Reductions:
    """Positions in a rank's list of actions at which gradients are reduced."""

    last_inside: set[int]
    """Indices of backward passes whose hooks reduce, each the last of its stage."""
    after: dict[int, bool]
    """Indices of actions that a reduction follows, and whether it is the last of its stage."""
    awaited: set[int]
    """Stages whose reductions are waited for at the end of the step, not in backward."""


def reductions_of(actions: Sequence[Action], is_each: bool) -> Reductions:
    """Return when gradients are reduced: after each microbatch (`is_each`), or after the last one only.

    A backward that waits for its reductions blocks the rank. A stage that sends gradients to the previous stage does
    not wait, and reduces unsharded gradients only after its last send, so that reductions do not delay the pipeline.

    A split backward reduces after its second part: FSDP2's hooks fire in the first part, before parameters have
    gradients, except on the first stage, whose inputs need no gradient.
    """
    last = {action.stage: index for index, action in enumerate(actions) if action.kind in ("B", "W")}
    sending = {action.stage for action in actions if action.kind == "SEND_B"}
    inside, after = set[int](), dict[int, bool]()
    for index, action in enumerate(actions):
        is_last = last.get(action.stage) == index
        if action.kind == "W" and (is_each or is_last):
            after[index] = is_last
        if is_last and (is_each or (action.kind == "B" and action.stage not in sending)):
            inside.add(index)
        elif is_last and action.kind == "B":
            after[actions.index(Action("SEND_B", action.stage, action.microbatch))] = True
    return Reductions(inside, after, sending | {actions[index].stage for index in after})
