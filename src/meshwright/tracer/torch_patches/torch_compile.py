"""torch.compile while a step is traced: Inductor's kernels are recorded in place of code that is generated and run."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.errors import UnsupportedError
from meshwright.tracer.record.recording_mode import RecordingMode
from meshwright.tracer.torch_patches.torch_names import SUPPORTED


def record_compiled(mode: RecordingMode) -> None:
    """Have what is to be compiled by Inductor record the kernels that it would make."""
    compile_module = nn.Module.compile

    def by_recording(compile_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", "inductor")
            if backend == "aot_eager":
                importlib.import_module("meshwright.tracer.torch_patches.torch_random_states").save_no_random_states()
            if backend == "inductor":
                kwargs["backend"] = recording_compiler(mode)
                # Inductor's own, none of which changes what it fuses.
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
        # The compiler takes seconds to import, which only a job that compiles shall wait for.
        compiled = importlib.import_module("meshwright.tracer.record.compiled")
    except ImportError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} has another compiler than the one that a dry run of compiled blocks asks for "
            f"its kernels ({error}): install {SUPPORTED}, or set layout.compile to false"
        ) from error
    backend: Callable[..., Any] = compiled.recording_backend(mode)
    return backend
