"""multiply_by_onednn: the host multiplies float32 matrices by oneDNN instead of MKL, both of which torch contains.

torch 2.11 to 2.15 take MKL for them on x86. On AMD's processors MKL leaves half of the vector unit idle (a core of an
AMD EPYC with AVX-512, torch 2.13.0, 2026-11-27): 105 to 113 GFLOP/s, oneDNN 190 to 260; without AVX-512 100 and 113.
On Intel's both reach the same.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LEAST_PRODUCTS = 2_000_000
"""Of smaller matmuls oneDNN's start is longer than what it saves, 10 us (64 x 64 x 64: 15 us, MKL 6)."""
_CPU = "CPU"


@cache
def multiply_by_onednn() -> None:
    """Replace, for this process, the host's kernels of aten.mm and aten.addmm, also those that Inductor calls.

    What oneDNN does not take runs as before: other formats, small matrices, and all while it is off
    (torch.backends.mkldnn.set_flags(False)).
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns that it has a kernel, which is the point.
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in (("mm", _Matmul), ("addmm", _MatmulAndBias)):
            for overload in (name, f"{name}.out"):
                # A kernel is no code of the model: Dynamo would compile it where it runs one operator by itself.
                run = torch.compiler.disable(kernel(overload).__call__)
                library.impl(overload, run, _CPU, with_keyset=True)
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
"""A library takes its kernels away when it is deleted."""


class _Replacement:
    """A kernel that calls oneDNN where it can, and else torch's own."""

    def __init__(self, name: str) -> None:
        self._torch_kernel = torch.library.get_kernel(f"aten::{name}", _CPU)

    def _by_torch(self, keys: Any, *args: Any, **options: Any) -> Tensor:
        result: Tensor = self._torch_kernel.call_boxed(keys, *args, **options)
        return result


class _Matmul(_Replacement):
    """aten.mm, with or without `out`."""

    def __call__(self, keys: Any, left_MK: Tensor, right_KN: Tensor, **out: Tensor) -> Tensor:
        if not _is_for_onednn(left_MK, right_KN, **out):
            return self._by_torch(keys, left_MK, right_KN, **out)
        return _product(left_MK, right_KN, None, **out)


class _MatmulAndBias(_Replacement):
    """aten.addmm, of which oneDNN takes a linear layer's: one number added to each column."""

    def __call__(self, keys: Any, added: Tensor, left_MK: Tensor, right_KN: Tensor, **options: Any) -> Tensor:
        is_scaled = (options.get("beta", 1), options.get("alpha", 1)) != (1, 1)
        is_bias = added.dtype is torch.float32 and added.shape == right_KN.shape[1:]
        out = {"out": options["out"]} if "out" in options else {}
        if is_scaled or not is_bias or not _is_for_onednn(left_MK, right_KN, **out):
            return self._by_torch(keys, added, left_MK, right_KN, **options)
        return _product(left_MK, right_KN, added, **out)


def _is_for_onednn(left_MK: Tensor, right_KN: Tensor, out: Tensor | None = None) -> bool:
    are_float32 = left_MK.dtype is right_KN.dtype is torch.float32 and (out is None or out.dtype is torch.float32)
    if not are_float32 or left_MK.dim() != 2 or right_KN.dim() != 2 or left_MK.shape[1] != right_KN.shape[0]:
        # torch explains what it refuses.
        return False
    shape = (left_MK.shape[0], right_KN.shape[1])
    is_large = left_MK.numel() * shape[1] >= _LEAST_PRODUCTS
    return is_large and (out is None or out.shape == shape) and torch._C._get_mkldnn_enabled()


def _product(left_MK: Tensor, right_KN: Tensor, bias_N: Tensor | None, out: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(left_MK, right_KN.t(), bias_N, "none", [], "")
    return product if out is None else out.copy_(product)
