"""RNG states in compiled graphs: a traced step saves none."""

from __future__ import annotations

from functools import cache

from torch._functorch import partitioners

from meshwright.parallelism.torch_private.torch_compiler import save_meshes_last
from meshwright.tracer.torch_patches.torch_names import replace


@cache
def save_no_random_states() -> None:
    """Make the graphs of a recomputed block save no RNG states from forward for backward, permanently.

    torch saves and restores them by higher-order operators that run on CPU and CUDA only (2.13: also around attention
    without dropout). They are a few bytes, and fake tensors have no values.
    """
    # Recomputation replaces the same function, once: call it first, so that it does not undo this.
    save_meshes_last()
    replace(partitioners, "functionalize_rng_ops", lambda _: lambda _, forward, backward, *__: (forward, backward))
