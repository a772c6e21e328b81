"""Prefixes of names in profiles and traces: of ranges that the runtime sets, and of what FSDP2 and DDP do.

Those of a pipeline's actions are in spec/layout/schedule/action.py.
"""

STEP_MARK = "ProfilerStep#"
"""Before the number of an optimizer step, from its data to its update; as torch's own profiler calls steps."""

DATA_MARK = "data"
"""Waiting for the samples of a step."""

AXIS_MARK = "axis "
"""Before the description of the process group that a collective or a message runs in, such as mesh_tp."""

FSDP_MARK = "FSDP::"
"""How torch marks what FSDP2 does between modules; a scope that begins with it is no part of the model."""
DDP_MARK = "DDP::"
"""How the tracer marks what DistributedDataParallel does between modules."""

NO_AXIS = "other process group"
"""What a group without a mesh axis is called in tables, such as that of all ranks."""
