"""Any rank of hundreds holds its own part of the same initial weights, and nothing else."""

import pytest
import torch

from meshwright.models.build import build_model
from meshwright.models.initial import initialize
from meshwright.parallelism.apply import parallelize
from meshwright.parallelism.data.materialize import materialize_stages
from meshwright.parallelism.mesh import build_meshes
from meshwright.parallelism.torch_private.torch_compat import canonical_parameters, local_box
from meshwright.spec.job.sections import ModelSection, PrecisionSection
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.layout_text import layout_text
from meshwright.spec.layout.schedule.schedule import build_schedule

NUM_RANKS = 256
MODEL = ModelSection(source="llama-1m", options={"num_layers": 2})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=256),
        Layout(dp_replicate=8, dp_shard=32),
        Layout(dp_replicate=2, dp_shard=8, cp=2, tp=4, pp=2, stage_boundaries=(1,)),
    ],
    ids=layout_text,
)
def test_a_rank_holds_its_slice_of_the_whole(fake_rank: int, layout: Layout) -> None:
    whole = build_model(MODEL)
    initialize(whole, seed=3)
    with torch.device("meta"):
        model = build_model(MODEL)
    meshes, schedule = build_meshes(layout, "cpu"), build_schedule(layout, num_microbatches=4)
    sharded = parallelize(model, meshes, PrecisionSection(), schedule, 64)
    materialize_stages(sharded, meshes, seed=3)
    expected = dict(whole.named_parameters())
    num_local = 0
    for name, parameter in canonical_parameters(sharded):
        local, offsets = local_box(parameter)
        num_local += local.numel()
        box = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
        assert torch.equal(local, expected[name][box]), name
    # FSDP2 deals out whole rows, so the fullest rank of a tensor has at most one row more than the mean.
    row = max(parameter[0].numel() for parameter in expected.values())
    assert num_local <= sum(p.numel() for p in expected.values()) / (layout.fsdp * layout.tp) + row * len(expected)
