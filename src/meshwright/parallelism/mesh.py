"""Device meshes of a layout: three views of the same ranks, axes outermost first.

    dense      pp, dp_replicate, fsdp, tp                fsdp = dp_shard x cp: they share one copy of the parameters
    batch      pp, dp_replicate, dp_shard, cp, tp        sharding of samples and sequences
    experts    pp, dp_replicate, expert_dp_shard, ep, etp          expert_dp_shard x ep x etp = dp_shard x cp x tp

FSDP2 requires that its mesh and that of tensor or expert parallelism have the same root, so all three are made from one
mesh of all ranks.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.channels.listening_sockets import closed_afterwards
from meshwright.parallelism.torch_private.torch_nccl import limited_options
from meshwright.parallelism.torch_private.torch_timeouts import wait_like_default_group
from meshwright.spec.layout.layout import AXES, Layout

_VIEWS = {
    "dense": ("pp", "dp_replicate", "fsdp", "tp"),
    "batch": AXES,
    "experts": ("pp", "dp_replicate", "expert_dp_shard", "ep", "etp"),
}
_VIEW_OF_AXIS = {axis: view for view, axes in reversed(_VIEWS.items()) for axis in axes}


@dataclass(frozen=True)
class Meshes:
    """Device meshes of the ranks of `layout`."""

    layout: Layout
    dense: DeviceMesh
    batch: DeviceMesh
    experts: DeviceMesh
    has_outer_replicas: bool = False
    """Whether gradients are also summed over replicas that are no part of this process group."""
    _axes: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def device_type(self) -> str:
        """Return "cpu" or "cuda"."""
        return self.dense.device_type

    def axis(self, name: str) -> DeviceMesh:
        """Return this rank's one-dimensional mesh along an axis of any view, such as "tp", "cp" or "ep"."""
        if name not in self._axes:
            # Cached: torch makes a new mesh on each access, in 0.1 ms (2.13).
            self._axes[name] = getattr(self, _VIEW_OF_AXIS[name])[name]
        return self._axes[name]

    def degree(self, name: str) -> int:
        """Return the number of ranks along an axis."""
        return self.axis(name).size()

    def rank(self, name: str) -> int:
        """Return this rank's index along an axis."""
        return self.axis(name).get_local_rank()

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of this rank along an axis."""
        return self.axis(name).get_group()

    @property
    def dp_rank(self) -> int:
        """Return this rank's data-parallel index, less than layout.dp."""
        return self.rank("dp_replicate") * self.layout.dp_shard + self.rank("dp_shard")

    def sharding(self, shard_axis: str, *, keeps_sums: bool = False) -> DeviceMesh:
        """Return the mesh that FSDP2 shards over: (fsdp) or (expert_dp_shard), with dp_replicate before it for HSDP.

        With `keeps_sums`, and with replicas outside, also for one replica: FSDP2 then keeps sums over microbatches in
        the format of reductions, and knows a last reduction of a step.
        """
        view: DeviceMesh = getattr(self, _VIEW_OF_AXIS[shard_axis])
        has_replicas = self.layout.dp_replicate > 1 or keeps_sums or self.has_outer_replicas
        return view["dp_replicate", shard_axis] if has_replicas else view[shard_axis]


def build_meshes(layout: Layout, device_type: str, *, has_outer_replicas: bool = False) -> Meshes:
    """Return the meshes of `layout` over all ranks of the process group; a collective."""
    # NCCL may listen for longer than its groups take to form.
    with closed_afterwards() if device_type == "cpu" else nullcontext():
        world = init_device_mesh(device_type, (layout.num_ranks,), mesh_dim_names=("world",))
        views = {
            name: world._unflatten(0, tuple(getattr(layout, axis) for axis in axes), axes, **_limits(layout, axes))
            for name, axes in _VIEWS.items()
        }
    wait_like_default_group(group for mesh in views.values() for group in mesh.get_all_groups())
    return Meshes(layout, **views, has_outer_replicas=has_outer_replicas)


def _limits(layout: Layout, axes: Sequence[str]) -> dict[str, Any]:
    """Return arguments with options of each axis' groups; none for those of the default group, which an axis of all
    ranks then shares.
    """
    options = {axis: limited_options(layout.communication_sms) for axis in axes}
    return {} if None in options.values() else {"backend_override": options}
