"""What "auto" comes to by the degrees of a layout, of one or of arrays of many."""

from typing import Any


def auto_reshards(pp: Any) -> Any:
    """Return whether reshard_after_forward = "auto" frees unsharded parameters after forward: not in a pipeline."""
    return pp == 1


def auto_reduces_each_microbatch(fsdp: Any, pp: Any) -> Any:
    """Return whether gradient_sync = "auto" reduces after each backward over `fsdp` ranks that share parameters.

    A pipeline holds a share of the blocks, and has a microbatch for each of its ranks or more.
    """
    return (fsdp > 1) & (pp == 1)
