"""The float8 recipe that a device runs: the one asked for, or the next simpler one whose kernel works.

On CUDA a kernel works if it multiplies small matrices: that covers devices without units for it and builds of torch
without the kernel; the order is that of the planner (spec/job/float8_ladder.py). A CPU computes every recipe, emulated;
a simulated device is taken to. ROCm was never tried, and gets none.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshwright.parallelism.torch_private.torch_compat import import_torchao
from meshwright.spec.job.float8_ladder import recipes_down_from
from meshwright.spec.job.sections import Float8Recipe

_SIDE = 128
"""Of the matrices that are tried."""


def scaled_matmul() -> Any:
    """Return the module of scaled matmuls, imported when it is needed: it imports torchao, an extra."""
    for name in ("torchao.float8", "torchao.prototype.mx_formats.mx_tensor"):
        import_torchao(name, "precision.float8")
    return import_module("meshwright.parallelism.torch_private.torch_scaled_matmul")


def supported_recipe(wanted: Float8Recipe, device_type: str) -> tuple[Float8Recipe, str]:
    """Return the recipe that all ranks run, and why not `wanted` where it is another; a collective on CUDA."""
    if find_spec("torchao") is None:
        return "none", "torchao is not installed: pip install '.[torchao]' in Meshwright's checkout"
    if device_type != "cuda":
        return wanted, ""
    steps: list[Float8Recipe] = [*recipes_down_from(wanted), "none"]
    errors = [_error_of(_trial(recipe, device_type)) for recipe in steps[:-1]]
    own = next((step for step, error in enumerate(errors) if error is None), len(errors))
    found = _furthest(own, device_type)
    return steps[found], "" if found == 0 else errors[0] or "another rank's device"


def experts_problem(device_type: str) -> str | None:
    """Return why a rank's device runs no grouped float8 matmul, None where all do; a collective on CUDA."""
    if device_type != "cuda":
        return None
    error = _error_of(lambda: _grouped_trial(device_type))
    return (error or "another rank's device") if _furthest(int(error is not None), device_type) else None


def _furthest(own: int, device_type: str) -> int:
    """Return the largest number of all ranks."""
    largest = torch.tensor(own, device=device_type)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _error_of(trial: Callable[[], object]) -> str | None:
    """Return the first line of the error of a small matmul, None if it runs."""
    if torch.version.hip is not None:
        return "ROCm was never tried"
    try:
        trial()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


def _trial(recipe: Float8Recipe, device_type: str) -> Callable[[], Tensor]:
    """Return a function that multiplies by the recipe's kernel."""
    wide = torch.zeros(_SIDE, _SIDE, device=device_type, dtype=torch.bfloat16)
    if recipe == "mxfp8":
        kernels = scaled_matmul()
        low = kernels.to_block_scaled(wide)
        return lambda: kernels.block_scaled_matmul(low, low, wide.dtype, emulates=False)
    left, by_row = wide.to(torch.float8_e4m3fn), recipe != "tensorwise"
    scale_a = torch.ones((_SIDE, 1) if by_row else (), device=device_type)
    scale_b = torch.ones((1, _SIDE) if by_row else (), device=device_type)
    return lambda: torch._scaled_mm(
        left, left.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=by_row
    )


def _grouped_trial(device_type: str) -> Tensor:
    kernels = scaled_matmul()
    rows = torch.zeros(_SIDE, _SIDE, device=device_type, dtype=torch.bfloat16)
    counts = torch.full((2,), _SIDE // 2, device=device_type)
    low = kernels.to_row_scaled(rows), kernels.to_row_scaled(torch.stack([rows, rows]))
    product: Tensor = kernels.row_scaled_grouped_matmul(*low, counts, emulates=False)
    return product
