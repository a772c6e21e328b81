"""torch's compiler pass that overlaps a matmul with its own communication, and the memory that it needs; both private.

torch 2.13 says that a group need not be enabled for symmetric memory, but its pass leaves out one that is not.
"""

import warnings
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import _symmetric_memory


def has_symmetric_memory(device_type: str) -> bool:
    """Return whether ranks can read each other's memory on this kind of device (checked in 2.13: CUDA alone)."""
    return device_type == "cuda" and dist.is_nccl_available()


def pipeline_matmuls(group: dist.ProcessGroup) -> None:
    """Let inductor, from here on, join each matmul over `group` with the gather before it or the scatter after it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)
    torch._inductor.config._micro_pipeline_tp = True
    # Imported here: it takes seconds.
    from torch._inductor.fx_passes import micro_pipeline_tp  # noqa: PLC0415

    # Where the compiler overlaps collectives (torch_overlap.py), the pass leaves out those that another matmul could
    # hide, though such matmuls run only after the collective's own: in backward most would stay exposed.
    assert hasattr(micro_pipeline_tp, "_get_unexposed_collectives"), torch.__version__
    torch_pass: Any = micro_pipeline_tp
    torch_pass._get_unexposed_collectives = lambda _: []
