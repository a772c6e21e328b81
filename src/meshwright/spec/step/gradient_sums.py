"""Which gradients replicas sum one by one where a processor's rank holds the whole model, and which all at once."""

from meshwright.spec.model.op import Norm, Op
from meshwright.spec.step.workload import BYTES_PER_ELEMENT

SUMMED_ALONE_BYTES = 64 << 10
"""A gradient below this is cheaper to copy into a buffer with others than to send on its own."""


def sizes_summed_alone(op: Op) -> tuple[int, ...]:
    """Return the elements of each parameter of `op` whose gradient in float32 is summed on its own."""
    of_bias = 0
    if getattr(op, "has_bias", False):
        of_bias = op.width if isinstance(op, Norm) else getattr(op, "num_experts", 1) * getattr(op, "out_features", 0)
    sizes = op.num_parameters - of_bias, of_bias
    return tuple(size for size in sizes if size * BYTES_PER_ELEMENT["float32"] >= SUMMED_ALONE_BYTES)
