"""Casts an exported tensor to the dtype of the export: an error if a finite value overflows, a warning for float64."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.format.dtypes import dtype_name
from meshwright.errors import CheckpointError
from meshwright.log import logger
from meshwright.units import counted


def warn_of_float64(saved: Mapping[str, torch.dtype], source: Path) -> None:
    """Log a warning if tensors of `source` are in float64, which no export has."""
    if names := [name for name, dtype in saved.items() if dtype == torch.float64]:
        given = source, counted(len(names), "tensor"), names[0]
        logger.warning("%s has %s in float64, the first is %s: the export rounds them", *given)


def rounded(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return `tensor` in `dtype`; raises CheckpointError, which calls it `name`, if a finite value became infinite."""
    result = tensor.to(dtype)
    # A wider range holds all values; float32 has some that round to more than the largest bfloat16.
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max or not result.isinf().any():
        return result
    overflows = result.isinf() & tensor.isfinite()
    if not overflows.any():
        return result
    largest = float(tensor[overflows].abs().max())
    fits_float32 = largest <= torch.finfo(torch.float32).max
    advice = "export with --dtype float32" if fits_float32 else "no export holds it, so take an earlier checkpoint"
    raise CheckpointError(
        f"{name} holds {largest:.4g}, and {dtype_name(dtype)} ends at {torch.finfo(dtype).max:.4g}, so that it would "
        f"become infinite: {advice}"
    )
