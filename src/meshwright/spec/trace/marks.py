"""What the names of a profiler's ranges begin with that the runtime sets, and that whoever reads a profile looks for.

Those of a pipeline's actions are in spec/layout/schedule/action.py.
"""

STEP_MARK = "ProfilerStep#"
"""Before the number of an optimizer step, from its data to its update; as torch's own profiler calls steps."""

DATA_MARK = "data"
"""Waiting for the samples of a step."""

AXIS_MARK = "axis "
"""Before the description of the process group that a collective or a message runs in, such as mesh_tp."""
