"""keep_freed_memory: a rank on a processor keeps the memory that it frees, for the next step.

Each step allocates its activations and gradients. glibc gives large blocks back to the system as they are freed, and
the system hands out every page again as zeros, at a fault each. GPUs have torch's caching allocator for this, the host
has none.
"""

import ctypes
from collections.abc import Mapping

# malloc.h of glibc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_THRESHOLD = 32 << 20
"""Bytes; glibc takes no more on 64 bits. Larger blocks are mapped and given back one by one."""
_VARIABLES = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Settings of the user, which are kept (man mallopt)."""


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let this process keep freed blocks of up to 32 MiB, unless `environment` says how; return whether it will.

    False also where the C library is not glibc.
    """
    if any(name in environment for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
