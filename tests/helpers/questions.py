"""Questions to the planner that are small enough for a test."""

from __future__ import annotations

from typing import Any

from meshwright.cost.stack_factors import load_stack
from meshwright.cost.training_setup import TrainingSetup
from meshwright.hardware.catalogue import load_cluster
from meshwright.planner.plan import make_plan
from meshwright.planner.request import PlanRequest
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model_spec import model_spec
from meshwright.spec.model.presets import PRESETS
from meshwright.spec.run.layout_plan import Plan
from meshwright.spec.step.workload import Workload

SMALL_PLAN = (
    *("plan", "--model", "llama3-8b", "--cluster", "h100-ib400:8"),
    *("--seq-len", "2048", "--global-batch-size", "16"),
)
"""A command line whose answer takes a fraction of a second."""
SMALL_JOB = """# A small job.
[model]
source = "llama3-8b"  # Meta's

[train]
seq_len = 2048
global_batch_size = 16

[precision]
compute = "bfloat16"

[cluster]
name = "h100-ib400"
num_devices = 8
"""
"""The same as a job file."""


_planned: dict[str, Plan] = {}


def planned_once(request: PlanRequest, *rest: Any, **options: Any) -> Plan:
    """Return what make_plan does, planned once a process: for tests of what becomes of a plan, which ask the same."""
    asked = repr((request, rest, options))
    if asked not in _planned:
        _planned[asked] = make_plan(request, *rest, **options)
    return _planned[asked]


def ask(
    model: str = "llama3-8b",
    num_devices: int = 16,
    *,
    seq_len: int = 4096,
    batch: int = 64,
    cluster: str = "h100-ib400",
    given: Layout | None = None,
    **fixed: Any,
) -> PlanRequest:
    """Return a question about a preset on devices of a cluster of the catalogue; `fixed` are keys of its layout."""
    architecture = PRESETS[model]
    setup = TrainingSetup(
        model=model_spec(architecture),
        workload=Workload(seq_len=seq_len, global_batch_size=batch),
        cluster=load_cluster(cluster).with_num_devices(num_devices),
        stack=load_stack("meshwright"),
    )
    return PlanRequest(model, architecture, setup, fixed, given)
