"""AttentionBackend: the values of layout.attention_backend, and what each needs."""

from typing import Literal

AttentionBackend = Literal["auto", "flash", "cudnn", "efficient", "math", "flex", "varlen"]

SPARSE_BACKENDS: tuple[AttentionBackend, ...] = ("flex", "varlen")
"""Backends that skip scores which documents or a window hide; both run outside of compiled blocks."""
CUDA_BACKENDS: tuple[AttentionBackend, ...] = ("cudnn", "efficient", "varlen")
"""Backends without a kernel on a CPU."""
