"""prepare_host_process: what every rank on a processor does before its first tensor, in runs and in measurements."""

from collections.abc import Mapping

import torch

from meshwright.hardware.machine import is_amd_processor
from meshwright.parallelism.torch_private.torch_host_matmul import multiply_by_onednn
from meshwright.trainer.launch.local.host_allocator import keep_freed_memory


def prepare_host_process(environment: Mapping[str, str]) -> None:
    """Have this process keep what it frees, and multiply by the library that is faster on this processor.

    A rule instead of a measurement: a run that is resumed gets the library, and so the bits, of its first part.
    """
    keep_freed_memory(environment)
    if takes_onednn():
        multiply_by_onednn()


def takes_onednn() -> bool:
    """Return whether ranks on this processor multiply float32 matrices by oneDNN instead of what torch takes."""
    return is_amd_processor() and torch.backends.mkldnn.is_available()
