"""step_of(): the step that a user's builder returns; a builder that cannot be called is refused in one message."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from meshwright.errors import UnsupportedError

Step = Callable[[], object]


def find_builder(build: str) -> Callable[..., Step]:
    """Return the function that `build`, as module:function, names; raises UnsupportedError where none has that name."""
    name, _, function = build.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UnsupportedError(
            f"there is no module {error.name}: name an installed module, or a file as FILE.py:FUNCTION"
        ) from None
    except SyntaxError as error:
        raise UnsupportedError(
            f"syntax error: {error.msg} ({error.filename}:{error.lineno}): correct the line"
        ) from None
    found: Callable[..., Step] | None = getattr(module, function, None)
    if not callable(found):
        wrong = "no function" if found is None else f"an object of type {type(found).__name__}, no function,"
        own = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and _is_of(value, name))
        raise UnsupportedError(
            f"{module.__file__ or name} has {wrong} {function}: "
            + (f"use one of {', '.join(own)}" if own else "define it as a function of (device, rank, world_size)")
        )
    return found


def step_of(build: str, *arguments: Any) -> Step:
    """Return the step that a builder returns for (device, rank, world_size, ...).

    Raises UnsupportedError for a builder that does not take these, or that returns no function without arguments.
    """
    builder = find_builder(build)
    if (why := _mismatch(builder, arguments)) is not None:
        more = ", ..." if len(arguments) > 3 else ""
        raise UnsupportedError(
            f"{_named(builder)} does not take (device, rank, world_size{more}): {why}: "
            "make it a function of these that returns a step, which takes nothing"
        )
    step = builder(*arguments)
    if not callable(step):
        raise UnsupportedError(
            f"{_named(builder)} returned {step!r:.80}, not a step: "
            "return a function without arguments that runs one step"
        )
    if (why := _mismatch(step, ())) is not None:
        raise UnsupportedError(
            f"the step {_named(step)} is called without arguments: {why}: create its inputs in the builder"
        )
    return step


def _mismatch(function: Callable[..., object], arguments: tuple[Any, ...]) -> str | None:
    """Return why a function does not take `arguments`; None where it does, or has no signature to compare with."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def _named(function: Callable[..., object]) -> str:
    """Return a function's name, and its file and line where it has them."""
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _is_of(value: Any, module: str) -> bool:
    return bool(value.__module__ == module) and not value.__name__.startswith("_")
