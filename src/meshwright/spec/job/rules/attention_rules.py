"""What each layout.attention_backend computes, checked before any process starts.

    flash        no mask: no documents, no window shorter than the sequence; values as wide as keys
    cudnn        16 bits, head widths that are multiples of 8 up to 128, or 192 with values of 128; not deterministic
    varlen       16 bits, values as wide as keys
    flex, varlen no attention sinks, and flex no backward that keeps its outputs or runs in two parts
    all          of a sequence that ranks share only with ulysses, which makes it whole

Sources: torch 2.13, torch/nn/attention and aten's transformers/cuda/sdp_utils.cpp. What a device lacks is known when
the job is planned or starts: device_problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.spec.layout.attention_backend import CUDA_BACKENDS, SPARSE_BACKENDS, AttentionBackend
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.moe_architecture import MoEArchitecture
from meshwright.spec.problem import Fix, Problem

if TYPE_CHECKING:
    from meshwright.spec.job.job import Job

_KEY = "layout.attention_backend"
_AUTO: Fix = {_KEY: "auto"}
_16_BITS = ("bfloat16", "float16")
_WIDEST_CUDNN, _LATENT_WIDTHS, _ALIGNMENT = 128, (192, 128), 8


def attention_problems(job: Job, layout: Layout, architecture: LlamaArchitecture | None) -> Iterator[Problem]:
    """Yield why `layout` cannot compute the attention of `job`; a model of the user's own is known once it is built.

    Of a backend that the job's device lacks nothing else matters.
    """
    backend, compute, device = layout.attention_backend, job.precision.compute, job.run.device
    if device != "auto" and (missing := device_problem(backend, compute, device)) is not None:
        yield missing
        return
    if backend == "cudnn" and job.run.deterministic:
        yield Problem(
            f'{_KEY} = "cudnn" has no deterministic backward, which run.deterministic = true asks for',
            [{"run.deterministic": False}, {_KEY: "flash"}, _AUTO],
        )
    if backend == "flash" and job.data.mask_documents:
        yield no_documents()
    yield from attention_model_problems(backend, architecture, compute, job.train.seq_len)
    yield from attention_layout_problems(layout)


def no_documents() -> Problem:
    """Return why flash attention does not go with data.mask_documents."""
    return Problem(
        f'{_KEY} = "flash" takes no mask, which data.mask_documents = true needs',
        [{_KEY: "flex"}, {_KEY: "varlen"}, _AUTO],
    )


def attention_model_problems(
    backend: AttentionBackend, architecture: LlamaArchitecture | None, compute: str, seq_len: int
) -> Iterator[Problem]:
    """Yield why `backend` does not compute a model's attention in the format `compute`."""
    if obstacle := precision_obstacle(backend, compute):
        yield Problem(f'{_KEY} = "{backend}" {obstacle}', [{"precision.compute": "bfloat16"}, _AUTO])
    elif architecture is not None and (obstacle := model_obstacle(backend, architecture, seq_len)):
        yield Problem(f'{_KEY} = "{backend}" {obstacle}', [_AUTO])


def attention_layout_problems(layout: Layout) -> Iterator[Problem]:
    """Yield what of `layout` does not go with its attention backend."""
    backend = layout.attention_backend
    asked = f'{_KEY} = "{backend}"'
    if backend != "auto" and layout.cp > 1 and layout.cp_method != "ulysses":
        yield Problem(
            f"{asked} attends to whole sequences, of which layout.cp = {layout.cp} with layout.cp_method = "
            f'"{layout.cp_method}" leaves each rank parts',
            [{"layout.cp_method": "ulysses"}, _AUTO],
        )
    if backend != "flex":
        return
    saves = {layout.activation_checkpoint, *(layout.activation_checkpoint_blocks or ())} & {"selective", "auto"}
    if saves:
        yield Problem(
            f"{asked} is one compiled call, of which selective recomputation (layout.activation_checkpoint = "
            f'"{saves.pop()}") can save no output',
            [{"layout.activation_checkpoint": "full"}, {_KEY: "varlen"}, _AUTO],
        )
    if layout.may_split_backward:
        yield Problem(
            f'{asked} is not built for a backward in two parts, as layout.schedule = "{layout.schedule}" has',
            [{"layout.schedule": "1F1B"}, {_KEY: "varlen"}, _AUTO],
        )


def precision_obstacle(backend: AttentionBackend, compute: str) -> str:
    """Return why `backend` does not compute in that format on any device; "" if it does."""
    if backend in ("cudnn", "varlen") and compute not in _16_BITS:
        return f'computes in 16 bits (bfloat16, float16), and precision.compute = "{compute}"'
    return "has no float64, which precision.compute asks for" if backend == "efficient" and compute == "float64" else ""


def model_obstacle(backend: AttentionBackend, architecture: LlamaArchitecture, seq_len: int) -> str:
    """Return what of the model's attention `backend` does not compute; "" if it computes it."""
    windows = {architecture.window_of(layer) for layer in range(architecture.num_layers)} - {None}
    shorter = min((window for window in windows if window is not None and window < seq_len), default=None)
    if backend == "flash" and shorter is not None:
        return f"takes no mask, which the model's sliding_window = {shorter} needs"
    if backend in SPARSE_BACKENDS and architecture.has_sinks_and_output_bias:
        return "computes no attention sinks, which the model has"
    widths = _head_widths(architecture)
    if backend in ("flash", "varlen") and len(set(widths)) > 1:
        return f"needs values as wide as keys, and the model's heads are {widths[0]} and {widths[1]} wide"
    if backend == "cudnn" and not cudnn_takes(*widths):
        return f"takes heads of multiples of 8 up to 128, and the model's are {' and '.join(map(str, widths))} wide"
    return ""


def device_problem(backend: AttentionBackend, compute: str, device_type: str) -> Problem | None:
    """Return why `backend` does not run on what torch calls `device_type`, "cpu" or "cuda"; None if it does."""
    is_cpu, asked = device_type == "cpu", f'{_KEY} = "{backend}"'
    if is_cpu and backend in CUDA_BACKENDS:
        return Problem(f"{asked} has no kernel on a CPU", [{_KEY: "flex"}, _AUTO])
    if not is_cpu and backend == "flash" and compute not in _16_BITS:
        what = f'{asked} computes in 16 bits on a CUDA device, and precision.compute = "{compute}"'
        return Problem(what, [{"precision.compute": "bfloat16"}, _AUTO])
    if not is_cpu and backend == "flex" and compute == "float64":
        return Problem(f"{asked} has no float64 on a CUDA device, which precision.compute asks for", [_AUTO])
    return None


def _head_widths(architecture: LlamaArchitecture) -> tuple[int, int]:
    """Return the widths of a key head and of a value head."""
    latent = architecture.latent if isinstance(architecture, MoEArchitecture) else None
    return architecture.head_dim, architecture.head_dim if latent is None else latent.value_head_dim


def cudnn_takes(width: int, value_width: int) -> bool:
    """Return whether cuDNN's attention takes heads of these widths (torch 2.13)."""
    is_aligned = width % _ALIGNMENT == 0 and value_width % _ALIGNMENT == 0
    return is_aligned and (max(width, value_width) <= _WIDEST_CUDNN or (width, value_width) == _LATENT_WIDTHS)
