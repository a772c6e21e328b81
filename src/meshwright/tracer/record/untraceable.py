"""Errors for programs that cannot be traced: the operator, the module, the line and the fix."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_leaves

from meshwright.errors import MeshwrightError, UnsupportedError
from meshwright.tracer.programs.program_lines import line_of_error
from meshwright.tracer.record.scopes import Scopes
from meshwright.tracer.torch_patches.torch_names import replace

_OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


@contextmanager
def explained(scopes: Scopes, guesses: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Raise UnsupportedError with one message in place of any error of the traced program.

    `guesses` are, by line, the assumed values on which its control flow depended.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise UnsupportedError(
            f"sys.exit({code}) is called{line_of_error(error)}: every rank has to return from each step, "
            "since the others wait for it"
        ) from error
    except Exception as error:
        where = f" in {scopes.left_by_error}" if scopes.left_by_error else ""
        causes = "".join(f"; caused by {type(one).__name__}: {_first_line(one)}" for one in _causes(error))
        guessed = "".join(f"; before, {line} branched on an assumed value: {value}" for line, value in guesses.items())
        raise UnsupportedError(
            f"{type(error).__name__}{where}{line_of_error(error)}: {_first_line(error)}{causes}{guessed}"
        ) from error


def refuse(func: Any, error: Exception, scopes: Scopes) -> NoReturn:
    """Raise UnsupportedError for an operator that fake tensors do not support, else `error` itself."""
    what = f"{func}{_in(scopes)}{line_of_error(error)}"
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        raise UnsupportedError(
            f"{what}: its shape depends on values of a tensor, and fake tensors have none: use fixed sizes, such as a "
            "mask and torch.where"
        ) from error
    is_unknown = isinstance(error, UnsupportedOperatorException | NotImplementedError)
    if is_unknown or "no fake impl" in str(error):
        name = f"{func.namespace}::{func._opname}"
        raise UnsupportedError(
            f"{what}: it has no fake implementation, so the shapes of its results are unknown: "
            f'register one with torch.library.register_fake("{name}")'
        ) from error
    raise error


def refuse_number(scopes: Scopes, read_at: str = "") -> NoReturn:
    """Raise UnsupportedError for a branch or size that depends on an integer from the device."""
    where = f", read at {read_at}," if read_at else ""
    raise UnsupportedError(
        f".item(), .tolist() or int(){_in(scopes)}{line_of_error(None)}{where} reads an integer from a tensor, and "
        "fake tensors have no values: take sizes from shapes, or keep the number on the host"
    )


def refuse_untraceable(scopes: Scopes) -> None:
    """Make FSDP1, parameters without sizes, torch.save() and collectives of objects raise UnsupportedError from now on.

    torch.save() raises it for tensors only, before it opens a file.
    """
    fsdp1 = _refusal(
        scopes,
        "torch.distributed.fsdp.FullyShardedDataParallel{} is FSDP1, whose flat parameters cannot be traced: use "
        "torch.distributed.fsdp.fully_shard (FSDP2)",
    )
    lazy = _refusal(
        scopes,
        "a lazy module{}: its parameters have no sizes before its first input, and fake tensors need sizes: use a "
        "module with sizes, such as nn.Linear(in_features, out_features)",
    )
    save = _refusal(
        scopes,
        "torch.save(){}: it writes values of tensors, and fake tensors have none: do not save in the traced program",
    )
    replace(FullyShardedDataParallel, "__init__", lambda _: fsdp1)
    replace((UninitializedParameter, UninitializedBuffer), "__new__", lambda _: lazy)
    replace(torch, "save", functools.partial(_saved_unless_tensors, save))
    for name in _OBJECT_COLLECTIVES:
        sends = _refusal(
            scopes,
            f"torch.distributed.{name}{{}}: it sends pickled objects, and fake tensors have no values: send tensors, "
            "or leave it out of the traced program",
        )
        replace((dist, distributed_c10d), name, functools.partial(functools.update_wrapper, sends))


def _refusal(scopes: Scopes, message: str) -> Callable[..., NoReturn]:
    """Return a function that raises UnsupportedError with `message`, in which {} is the module and the line."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(message.format(f"{_in(scopes)}{line_of_error(None)}"))

    return refused


def _saved_unless_tensors(refused: Callable[..., NoReturn], save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def called(value: Any, *args: Any, **kwargs: Any) -> Any:
        has_tensors = any(isinstance(leaf, Tensor | nn.Module) for leaf in tree_leaves(value))
        return (refused if has_tensors else save)(value, *args, **kwargs)

    return called


def _in(scopes: Scopes) -> str:
    return f" in {scopes.scope}" if scopes.scope else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the chain of causes of an error, the root cause last."""
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line]
    if not lines:
        return "no message"
    # A compiler error has its cause in the second line.
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
