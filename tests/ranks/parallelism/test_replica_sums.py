"""Gradients of whole models on processors: summed over replicas without FSDP2, in one order on all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.models.build import build_architecture
from meshwright.parallelism.apply import parallelize
from meshwright.parallelism.data.materialize import materialize_stages
from meshwright.parallelism.data.replica_sums import ReplicaSums, needs_no_sharding, start_all_reduce
from meshwright.parallelism.mesh import build_meshes
from meshwright.spec.job.sections import PrecisionSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.layout.schedule.schedule import build_schedule
from meshwright.spec.model.architecture import LlamaArchitecture
from run_ranks import run_ranks

WIDTH, NUM_MICROBATCHES = 160, 3
"""A matrix of this width is too large to be copied."""
ARCHITECTURE = {
    "vocab_size": 64,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "ffn_dim": 64,
    "rope_theta": 10_000.0,
    "max_seq_len": 64,
}


class Net(nn.Module):
    """Matrices, one of them transposed, one frozen, one that the last microbatch does not use; and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.early = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: Tensor, *, is_early: bool, is_reversed: bool) -> Tensor:
        y = x @ self.early if is_early else x
        outputs = [layer(x).tanh() for layer in (reversed(self.layers) if is_reversed else self.layers)]
        total: Tensor = sum(outputs, start=y @ self.transposed).sin().mean()
        return total


def _inputs(rank: int, microbatch: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + microbatch))


def _backward(model: Net, rank: int, microbatch: int) -> None:
    is_last = microbatch == NUM_MICROBATCHES - 1
    # Backward takes layers in another order on each rank.
    model(_inputs(rank, microbatch), is_early=not is_last, is_reversed=bool(rank)).backward()


def _gradients(model: Net) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _sum_over_ranks(num_steps: int) -> dict[str, Tensor]:
    model, rank = Net(), dist.get_rank()
    assert dist.group.WORLD is not None
    sums = ReplicaSums(model, partial(start_all_reduce, dist.group.WORLD))
    for _ in range(num_steps):
        model.zero_grad()
        for microbatch in range(NUM_MICROBATCHES):
            if microbatch == NUM_MICROBATCHES - 1:
                sums.begin()
            _backward(model, rank, microbatch)
        sums.end()
    return _gradients(model)


def test_gradients_are_sums_over_all_replicas_and_microbatches() -> None:
    of_ranks = run_ranks(_sum_over_ranks, 2, 2)
    model = Net()
    for rank in range(2):
        for microbatch in range(NUM_MICROBATCHES):
            _backward(model, rank, microbatch)
    expected = _gradients(model)
    assert "early" in expected
    for found in of_ranks:
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)
            assert torch.equal(gradient, of_ranks[0][name]), name


def _num_sharded(layouts: list[Layout], precision: PrecisionSection) -> list[tuple[int, bool]]:
    """Return the units of FSDP2 of each layout, and whether gradients are summed without it."""
    found = []
    for layout in layouts:
        meshes, schedule = build_meshes(layout, "cpu"), build_schedule(layout, 2)
        with torch.device("meta"):
            model = build_architecture(LlamaArchitecture(**ARCHITECTURE))
        stages = parallelize(model, meshes, precision, schedule, 16)
        materialize_stages(stages, meshes, seed=0)
        units = sum(isinstance(module, FSDPModule) for module in stages.modules())
        found.append((units, stages.replica_sums is not None))
    return found


def test_only_what_is_sharded_or_cast_is_in_units_of_fsdp2() -> None:
    layouts = [Layout(dp_replicate=2), Layout(dp_shard=2), Layout(tp=2)]
    num_units = ARCHITECTURE["num_layers"] + 1
    wide = run_ranks(_num_sharded, 2, layouts, PrecisionSection(compute="float32"))[0]
    assert wide == [(0, True), (num_units, False), (num_units, False)]
    narrow = run_ranks(_num_sharded, 2, layouts[:1], PrecisionSection(compute="bfloat16"))[0]
    assert narrow == [(num_units, False)]


WHOLE = partial(needs_no_sharding, nn.Linear(2, 2), device_type="cpu")
WIDE = PrecisionSection(compute="float32")


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=2), Layout(cp=2), Layout(tp=2), Layout(pp=2), Layout(dp_replicate=2, cpu_offload=True)],
    ids=layout_text,
)
def test_shared_parameters_are_sharded(layout: Layout) -> None:
    assert not WHOLE(layout, WIDE)
    assert WHOLE(Layout(dp_replicate=2), WIDE)


def test_what_is_cast_or_on_a_gpu_stays_with_fsdp2() -> None:
    layout = Layout()
    assert WHOLE(layout, WIDE)
    assert not WHOLE(layout, PrecisionSection(compute="bfloat16"))
    assert not WHOLE(layout, PrecisionSection(compute="float32", reduce="bfloat16"))
    assert not needs_no_sharding(nn.Linear(2, 2), layout, WIDE, "cuda")
    assert not needs_no_sharding(nn.Linear(2, 2).bfloat16(), layout, WIDE, "cpu")
