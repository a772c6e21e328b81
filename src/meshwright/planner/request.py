"""PlanRequest: what to plan: a model, a step's tokens, a cluster, and the keys that are fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.cost.layout_table import LayoutTable
from meshwright.cost.training_setup import Configurations, TrainingSetup
from meshwright.spec.job.sections import DEFAULT_MEMORY_MARGIN
from meshwright.spec.layout.layout import Layout
from meshwright.spec.machine.cluster import Cluster
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.step.workload import Workload


@dataclass(frozen=True)
class PlanRequest:
    """A request to the planner."""

    model_name: str
    """The model as the user named it."""
    architecture: LlamaArchitecture
    """Its sizes."""
    setup: TrainingSetup
    """The model, the workload, the cluster and the software stack; every device of the cluster is used."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the layout that the search may not change, with their values."""
    given: Layout | None = None
    """A layout that was set by hand and is judged next to the planner's pick."""

    memory_margin: float = DEFAULT_MEMORY_MARGIN
    """Share of the usable memory that layouts leave free to be chosen; one that is given fits without."""

    @property
    def margin_bytes(self) -> float:
        """Return the memory of a device that layouts leave free to be chosen."""
        return self.memory_margin * self.cluster.device.usable_memory_bytes

    @property
    def workload(self) -> Workload:
        """Return what a step processes."""
        return self.setup.workload

    @property
    def cluster(self) -> Cluster:
        """Return the cluster."""
        return self.setup.cluster

    @property
    def num_devices(self) -> int:
        """Return the devices that every layout uses."""
        return self.setup.cluster.num_devices

    def configs(self, layouts: LayoutTable) -> Configurations:
        """Return the layouts in the request's setup; those that compile their blocks have compiled kernels."""
        setup = self.setup
        if setup.stack.kernels != "eager":
            return Configurations.of_one(setup, layouts)
        compiled = replace(setup, stack=setup.stack.replace(kernels="compiled"))
        return Configurations((setup, compiled), layouts.compiles_blocks.astype(np.int64), layouts)

    def with_setup(self, **changes: Any) -> PlanRequest:
        """Return the same request with another model, workload, cluster or stack."""
        return replace(self, setup=replace(self.setup, **changes))
