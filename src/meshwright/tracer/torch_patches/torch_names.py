"""Replacement of torch's attributes, which have to exist, kernels of its operators, and what releases differ in."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.errors import UnsupportedError


def replace(owners: Any, name: str, by: Callable[[Any], Any]) -> None:
    """Replace an attribute of a module or a class, or of each of a tuple of them, by `by(original)`, permanently.

    Raises UnsupportedError if this torch has no such attribute, unless only others have it (ONLY_IN).
    """
    for owner in owners if isinstance(owners, tuple) else (owners,):
        if not hasattr(owner, name):
            if RELEASE not in ONLY_IN.get(name, (RELEASE,)):
                continue
            raise UnsupportedError(
                f"torch {torch.__version__} has no {owner.__name__}.{name}, which the tracer replaces: install "
                f"{SUPPORTED}"
            )
        setattr(owner, name, by(getattr(owner, name)))


def register_kernels(namespace: str, kernels: Mapping[str, Callable[..., Any]], key: str) -> None:
    """Register implementations of operators for a dispatch key, permanently."""
    library = torch.library.Library(namespace, "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, key)
    _libraries.append(library)


_libraries: list[torch.library.Library] = []
"""A library that is collected takes its kernels with it."""


@contextmanager
def with_values(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` within the context, or, as a decorator, during each call."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


SUPPORTED = "torch 2.11 to 2.15"
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
ONLY_IN = {
    "record_grad_output_stream": ((2, 15),),
    "_warmup_p2p": ((2, 12), (2, 13), (2, 14)),
    "_initialize_pipeline_distributed_state": ((2, 15),),
}
"""Names that are replaced in some releases only: others have no such attribute."""
JOINS_ALIKE = "2.13"
"""The release whose fused operations were compared with their parts; 2.11 and 2.15 differ (2026-11-23)."""
EFFICIENT_IS_GROUPED = RELEASE >= (2, 14)
"""Whether memory-efficient attention supports fewer heads of keys than of queries."""
_ops = torch.ops._c10d_functional
WAITS_FOR_SEVERAL = (_ops.wait_tensors.default,) if hasattr(_ops, "wait_tensors") else ()
"""The operator that waits for several collectives, since 2.15."""
