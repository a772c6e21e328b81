"""line_of_program(): the line of the user's own code that runs now, as messages and traces name it."""

import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch

_TORCH_FILES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/", "<")
"""Files whose lines explain nothing to a user: torch's, the tracer's, generated code."""
_PACKAGE_FILES = (
    f"{Path(__file__).parents[2]}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Files of installed packages, Python's own among them."""

_is_users_file: dict[str, bool] = {}


def line_of_program() -> str:
    """Return file:line of the innermost frame in a file of the user's own; "" where no such file called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return _named(frame)
        frame = frame.f_back
    return ""


def innermost_line() -> str:
    """Return file:line of the innermost frame that is neither torch's nor the tracer's, such as one of a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH_FILES):
        frame = frame.f_back
    return "" if frame is None else _named(frame)


def line_of_error(error: BaseException | None) -> str:
    """Return " (file:line)" of the user's line where an error arose, or, without one, of the line that runs now.

    Where only packages are involved it is the innermost line outside of torch; "" where there is none.
    """
    begun = traceback.extract_stack()
    frames = [*begun, *traceback.extract_tb(error.__traceback__ if error is not None else None)]
    outside = [frame for frame in frames if not frame.filename.startswith(_TORCH_FILES)]
    shown = [frame for frame in outside if _is_users(frame.filename)] or outside
    return f" ({shown[-1].filename}:{shown[-1].lineno})" if shown else ""


def _is_users(filename: str) -> bool:
    known = _is_users_file.get(filename)
    if known is None:
        known = _is_users_file[filename] = not filename.startswith((*_TORCH_FILES, *_PACKAGE_FILES))
    return known


def _named(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
