"""The device mesh of a Layout: its axes by name, outermost first."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.errors import UnsupportedError
from meshwright.spec.layout import UNBUILT_AXES, Layout


def require_supported(layout: Layout) -> None:
    """Raise UnsupportedError naming every degree that training cannot apply yet."""
    asked = [f"{key} = {getattr(layout, key.removeprefix('layout.'))}" for key in layout.unbuilt_keys()]
    if asked:
        raise UnsupportedError(
            f"{', '.join(asked)}: training applies dp_replicate and dp_shard so far, not "
            f"{', '.join(UNBUILT_AXES)}: set these degrees to 1 (`meshwright check` accepts them as a description)"
        )


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the data-parallel mesh: (dp_shard,), or (dp_replicate, dp_shard) for HSDP."""
    require_supported(layout)
    if layout.dp_replicate == 1:
        return init_device_mesh(device_type, (layout.dp_shard,), mesh_dim_names=("dp_shard",))
    shape = (layout.dp_replicate, layout.dp_shard)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
