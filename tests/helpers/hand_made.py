"""Sharded parameters made by hand, on every mesh that a layout has: what checkpoints and hashes are tested with.

Each element's value follows from its name and its place alone, so that any layout can be checked against any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from meshwright.parallelism.mesh import Meshes, build_meshes
from meshwright.parallelism.pipeline.stages import Stages
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule.schedule import build_schedule

# Sizes that not every number of ranks divides.
SHAPES = {"rows": (10, 3), "columns": (5, 8), "norm": (7,), "experts.gate": (8, 4, 3), "experts.down": (8, 3, 4)}
NUM_STAGES = 4
TIED = "embedding"


def whole_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor called `name`, whole."""
    start = sum(ord(letter) * 31**place for place, letter in enumerate(reversed(name[-6:]))) % 100_003
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).view(shape)


def all_values() -> dict[str, Tensor]:
    """Return every parameter of all stages by its canonical name."""
    names = {f"blocks.{stage}.{name}": shape for stage in range(NUM_STAGES) for name, shape in SHAPES.items()}
    return {name: whole_value(name, shape) for name, shape in (names | {TIED: SHAPES["rows"]}).items()}


def build(layout: Layout) -> tuple[Stages, Meshes]:
    """Return this rank's share of all parameters; a collective. Call it with a layout of 1, 2 or 4 stages."""
    meshes = build_meshes(layout, "cpu")
    per_stage = NUM_STAGES // layout.num_stages
    schedule = build_schedule(layout, num_microbatches=2 * layout.pp)
    stages = {}
    for number in schedule.stages_of_rank(meshes.rank("pp")):
        stage = nn.Module()
        stage.blocks = nn.ModuleList([None] * NUM_STAGES)  # type: ignore[list-item]
        for index in range(number * per_stage, (number + 1) * per_stage):
            stage.blocks[index] = _block(index, meshes)
        if number in (0, layout.num_stages - 1):
            stage.register_parameter(TIED, _on_tp(TIED, SHAPES["rows"], Shard(0), meshes))
        fully_shard(stage, mesh=meshes.sharding("fsdp"))
        stages[number] = stage
    return Stages(stages, [schedule.rank_of_stage(number) for number in range(schedule.num_stages)]), meshes


def _block(index: int, meshes: Meshes) -> nn.Module:
    block, experts = nn.Module(), nn.Module()
    placements: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "norm": Replicate()}
    for name, placement in placements.items():
        block.register_parameter(name, _on_tp(f"blocks.{index}.{name}", SHAPES[name], placement, meshes))
    for name in ("gate", "down"):
        whole = whole_value(f"blocks.{index}.experts.{name}", SHAPES[f"experts.{name}"])
        experts.register_parameter(name, nn.Parameter(distribute_tensor(whole, meshes.axis("ep"), [Shard(0)])))
    block.experts = experts
    fully_shard(experts, mesh=meshes.sharding("expert_dp_shard"))
    fully_shard(block, mesh=meshes.sharding("fsdp"))
    return block


def _on_tp(name: str, shape: tuple[int, ...], placement: Placement, meshes: Meshes) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(whole_value(name, shape), meshes.axis("tp"), [placement]))


def state(layout: Layout, *, factor: float) -> dict[str, Any]:
    """Return hand-made parameters times `factor` and the like of an optimizer's state of them; a collective."""
    model, _ = build(layout)
    parameters: dict[str, list[Tensor]] = {}
    for name, parameter in canonical_parameters(model):
        parameters.setdefault(name, []).append(parameter.detach().mul_(factor))
    moments = {
        name: {"step": [torch.full((), factor) for _ in copies], "exp_avg": [2 * tensor for tensor in copies]}
        for name, copies in parameters.items()
    }
    return {"model": parameters, "optimizer": moments}


def assert_state(filled: dict[str, Any]) -> None:
    """Fail unless each tensor of a `state` has the values that `state` gives it with a factor of 1."""
    values = all_values()
    for name, copies in filled["model"].items():
        for tensor, step, moment in zip(copies, *filled["optimizer"][name].values(), strict=True):
            local, offsets = local_box(tensor)
            box = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
            assert torch.equal(local, values[name][box]), name
            assert torch.equal(local_box(moment)[0], 2 * values[name][box]), name
            assert step == 1.0, name
