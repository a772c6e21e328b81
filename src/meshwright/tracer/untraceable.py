"""What cannot be traced, each as one message that names the operator, the module, the line and what to do."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.distributed import distributed_c10d

from meshwright.errors import MeshwrightError, UnsupportedError
from meshwright.tracer.scopes import Scopes

_OWN_FILES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")
"""Where lines stand that nobody asks about."""
_OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


@contextmanager
def explained(scopes: Scopes) -> Iterator[None]:
    """Raise UnsupportedError with one message in place of any error of the program that is traced."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        where = f" in {scopes.left_by_error}" if scopes.left_by_error else ""
        raise UnsupportedError(f"{type(error).__name__}{where}{_line_of(error)}: {_first_line(error)}") from error


def refuse(func: Any, error: Exception, scopes: Scopes) -> NoReturn:
    """Raise UnsupportedError for an operator that fake tensors have no answer to, else `error` itself."""
    what = f"{func}{_in(scopes)}{_line_of(error)}"
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        raise UnsupportedError(
            f"{what}: its result depends on the numbers in a tensor, and the tensors of a traced step hold none: "
            "compute with sizes that are known before, such as a mask and torch.where"
        ) from error
    is_unknown = isinstance(error, UnsupportedOperatorException | NotImplementedError)
    if is_unknown or "no fake impl" in str(error):
        name = f"{func.namespace}::{func._opname}"
        raise UnsupportedError(
            f"{what}: it has no fake implementation, which tells the shapes of its results: "
            f'register one with torch.library.register_fake("{name}")'
        ) from error
    raise error


def refuse_number(scopes: Scopes) -> NoReturn:
    """Raise UnsupportedError for a whole number that a program reads from the device, as sizes are."""
    raise UnsupportedError(
        f".item(), .tolist() or int(){_in(scopes)}{_line_of(None)} reads a whole number from a tensor, and the tensors "
        "of a traced step hold none: take sizes from shapes, or keep the number on the host"
    )


def refuse_object_collectives(scopes: Scopes) -> None:
    """Have torch's collectives of Python objects raise UnsupportedError from now on."""
    for name in _OBJECT_COLLECTIVES:
        refused = _refused(name, getattr(dist, name), scopes)
        setattr(dist, name, refused)
        setattr(distributed_c10d, name, refused)


def _refused(name: str, original: Callable[..., Any], scopes: Scopes) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"torch.distributed.{name}{_in(scopes)}{_line_of(None)}: it sends pickled objects, whose bytes no fake "
            "tensor holds: send tensors, or send the objects before the step is built"
        )

    return called


def _in(scopes: Scopes) -> str:
    return f" in {scopes.scope}" if scopes.scope else ""


def line_of_program() -> str:
    """Return where the program stands, as file:line, in the innermost code that is neither torch's nor the tracer's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _line_of(error: BaseException | None) -> str:
    """Return where in the user's own code an error arose, or, without one, where the program stands."""
    begun = traceback.extract_stack()
    frames = [*begun, *traceback.extract_tb(error.__traceback__ if error is not None else None)]
    mine = [frame for frame in frames if not frame.filename.startswith(_OWN_FILES)]
    return f" ({mine[-1].filename}:{mine[-1].lineno})" if mine else ""


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "it says nothing more")
