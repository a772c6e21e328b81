"""axis_mark: lets a profile say along which axis a collective runs; gloo's events name no group (2.13)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import distributed as dist
from torch.profiler import record_function

from meshwright.spec.trace.marks import AXIS_MARK


def axis_mark(group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """Return a range of the profiler named after `group`; nothing where nobody profiles, and in compiled code."""
    if torch.compiler.is_compiling() or not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return record_function(f"{AXIS_MARK}{group.group_desc}")
