"""Profiler ranges that name the mesh axis of a collective, since gloo's events name no group (2.13)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import distributed as dist
from torch.profiler import record_function

from meshwright.spec.trace.marks import AXIS_MARK


def profiler_range(group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """Return a profiler range named after `group`; a null context without a profiler and in compiled code."""
    if torch.compiler.is_compiling() or not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return record_function(f"{AXIS_MARK}{group.group_desc}")
