"""Asynchronous tensor parallelism: a matmul starts on the parts that have arrived while the others are on their way.

The compiler does it: in a compiled block it finds our gathers before matmuls, and the sums after them (collectives.py),
and runs each pair as one operation on memory that the ranks of tp share.
"""

from torch import distributed as dist

from meshwright.log import logger
from meshwright.parallelism.mesh import Meshes
from meshwright.parallelism.torch_private.torch_symmetric_memory import has_symmetric_memory, pipeline_matmuls


def apply_async_tensor_parallel(meshes: Meshes) -> None:
    """Tell the compiler to overlap, where layout.async_tp asks for it; before blocks are compiled.

    Without memory that ranks share the layout computes the same, one after the other, and says so.
    """
    if not meshes.layout.async_tp or meshes.degree("tp") == 1:
        return
    if has_symmetric_memory(meshes.device_type):
        pipeline_matmuls(meshes.group("tp"))
    elif dist.get_rank() == 0:
        logger.warning(
            "layout.async_tp = true has no effect on %s: ranks share no memory there, "
            "so matmuls wait for their communication",
            meshes.device_type,
        )
