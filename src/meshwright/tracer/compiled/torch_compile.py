"""torch.compile while a step is traced: Inductor's kernels are recorded instead of generated and run."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from meshwright.errors import UnsupportedError
from meshwright.parallelism.torch_private.torch_compiler import save_meshes_last
from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.torch_patches.torch_names import SUPPORTED, replace


def record_compiled(mode: RecordingMode) -> None:
    """Make modules compiled by Inductor record their kernels."""
    compile_module = nn.Module.compile

    def by_recording(compile_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", "inductor")
            if backend == "aot_eager":
                save_no_random_states()
            if backend == "inductor":
                kwargs["backend"] = recording_compiler(mode)
                # Inductor's options, none of which changes fusion.
                kwargs = {name: value for name, value in kwargs.items() if name not in ("mode", "options")}
            return compile_(*args, **kwargs)

        return compiled

    def compiled(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **kwargs)
        call: Any = module._compiled_call_impl

        def followed(*args: Any, **kwargs: Any) -> Any:
            # The hooks that follow calls of other modules are compiled away.
            mode.recorder.scopes.enter(module)
            try:
                return call(*args, **kwargs)
            finally:
                mode.recorder.scopes.leave(module)

        module._compiled_call_impl = followed

    torch.compile = by_recording(torch.compile)
    nn.Module.compile = compiled  # type: ignore[method-assign, assignment]


def recording_compiler(mode: RecordingMode) -> Callable[..., Any]:
    """Return the backend that records Inductor's kernels; raises UnsupportedError for a torch without its parts."""
    try:
        # Importing the compiler takes seconds, and only compiled jobs need it.
        compiled = importlib.import_module("meshwright.tracer.compiled.compiled_graph")
    except ImportError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} has another compiler than a simulation of compiled blocks supports "
            f"({error}): install {SUPPORTED}, or set layout.compile to false"
        ) from error
    backend: Callable[..., Any] = compiled.recording_backend(mode)
    return backend


@cache
def save_no_random_states() -> None:
    """Make the graphs of a recomputed block save no RNG states from forward for backward, permanently.

    torch saves and restores them by higher-order operators that run on CPU and CUDA only (2.13: also around attention
    without dropout). They are a few bytes, and fake tensors have no values.
    """
    # Recomputation replaces the same function, once: call it first, so that it does not undo this.
    save_meshes_last()
    # Importing the partitioners takes seconds, and only compiled jobs need them.
    replace(
        importlib.import_module("torch._functorch.partitioners"),
        "functionalize_rng_ops",
        lambda _: lambda _, forward, backward, *__: (forward, backward),
    )
