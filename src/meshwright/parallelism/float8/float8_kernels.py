"""The float8 recipe that a device runs: the one asked for, or the next simpler one whose kernel works.

    rowwise, rowwise_with_gw_hp -> tensorwise -> none

On CUDA a kernel works if it multiplies 16 x 16 matrices: that covers devices without float8 units (below compute
capability 8.9) and builds of torch without the kernel. A CPU computes every recipe, emulated; a simulated device is
taken to. ROCm was never tried, and gets none.
"""

from importlib.util import find_spec

import torch
from torch import distributed as dist

from meshwright.spec.job.sections import Float8Recipe

_LADDER: tuple[Float8Recipe, ...] = ("none", "tensorwise", "rowwise")
_SIDE = 16


def supported_recipe(wanted: Float8Recipe, device_type: str) -> tuple[Float8Recipe, str]:
    """Return the recipe that all ranks run, and why not `wanted` where it is another; a collective on CUDA."""
    if find_spec("torchao") is None:
        return "none", "torchao is not installed: pip install '.[torchao]' in Meshwright's checkout"
    if device_type != "cuda":
        return wanted, ""
    level, reason = _supported_level(wanted, device_type)
    lowest = torch.tensor(level, device=device_type)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    if int(lowest) == _level_of(wanted):
        return wanted, ""
    return _LADDER[int(lowest)], reason or "another rank's device"


def _level_of(recipe: Float8Recipe) -> int:
    return _LADDER.index("rowwise" if recipe == "rowwise_with_gw_hp" else recipe)


def _supported_level(wanted: Float8Recipe, device_type: str) -> tuple[int, str]:
    if torch.version.hip is not None:
        return 0, "ROCm was never tried"
    reason = ""
    for level in range(_level_of(wanted), 0, -1):
        error = _kernel_error(_LADDER[level], device_type)
        if error is None:
            return level, reason
        reason = reason or error
    return 0, reason


def _kernel_error(recipe: Float8Recipe, device_type: str) -> str | None:
    """Return the first line of the error of a small matmul by the recipe's kernel, None if it runs."""
    left = torch.zeros(_SIDE, _SIDE, device=device_type).to(torch.float8_e4m3fn)
    by_row = recipe != "tensorwise"
    scale_a = torch.ones((_SIDE, 1) if by_row else (), device=device_type)
    scale_b = torch.ones((1, _SIDE) if by_row else (), device=device_type)
    try:
        torch._scaled_mm(
            left, left.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=by_row
        )
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
