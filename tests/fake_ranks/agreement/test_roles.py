"""What a traced step's storages are for, against what the planner's formulas say of the same layout."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.config.load import load_job
from meshwright.cost.layout_table import layout_table
from meshwright.cost.memory.footprint import footprint_of_rank, memory_use
from meshwright.cost.training_setup import Configurations
from meshwright.planner.read_request import Options, plan_request
from meshwright.simulator.memory.memory_curve import memory_of, uncached_totals
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.estimate import MemoryUse
from meshwright.spec.trace.timeline import TensorRole
from meshwright.tracer.programs.trace_ranks import trace
from repository import ROOT
from trained_step import BUILD, arguments_of

JOB = str(ROOT / "examples" / "tiny.toml")
LAYOUT = Layout(dp_shard=2, tp=2, microbatch_size=2)
CLUSTER = ("cluster.name=h100-ib400", "cluster.num_devices=4", "train.global_batch_size=8")
OVERRIDES = ("layout.dp_shard=2", "layout.tp=2", *CLUSTER)


def predicted(overrides: tuple[str, ...]) -> MemoryUse:
    setup = plan_request(load_job(JOB, overrides), Options()).setup
    return memory_use(footprint_of_rank(Configurations.of_one(setup, layout_table([LAYOUT])), 0), 0)


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_roles_have_the_bytes_that_the_formulas_say(precision: str) -> None:
    overrides = (*OVERRIDES, f"precision.compute={precision}")
    found = trace(BUILD, 0, 4, arguments_of(JOB, *overrides))
    by_role = memory_of(found, np.zeros(len(found.records)), uncached_totals(found)).by_role
    formula = predicted(overrides)
    # Step counters of AdamW are a few bytes each.
    assert abs(by_role[0, TensorRole.PARAMETER] - formula.parameters_bytes) < 1024
    assert abs(by_role[0, TensorRole.OPTIMIZER_STATE] - formula.optimizer_state_bytes) < 1024
    # The formulas say what there is when most is: each role's own largest bytes are of other moments.
    fullest = by_role[by_role.sum(axis=1).argmax()]
    # Shards of gradients add up over microbatches next to what is gathered of the blocks at work.
    gathered = fullest[[TensorRole.GRADIENT, TensorRole.UNSHARDED_PARAMETER]].sum()
    assert abs(gathered / (formula.gradients_bytes + formula.unsharded_parameters_bytes) - 1) < 0.1
    assert abs(fullest[TensorRole.ACTIVATION] / formula.activations_bytes - 1) < 0.1
    assert by_role[:, TensorRole.OTHER].max() < 1024
