"""exit_code_of(): how a command or a rank ended, as an exit code, with what went wrong on stderr."""

import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from meshwright.errors import ExitCode, MeshwrightError
from meshwright.extras import EXTRA_OF_PACKAGE
from meshwright.log import fitted, logger

# The shell's own code for a process whose reader went away: 128 + SIGPIPE.
_READER_GONE = 141


def exit_code_of(action: Callable[[], int]) -> int:
    """Return the exit code that `action` returns, or that of the error that it raises, having shown it on stderr."""
    try:
        code = action()
        sys.stdout.flush()
    except BrokenPipeError as error:
        return _READER_GONE if _has_lost_its_reader() else _show(error)
    except SystemExit as ending:
        # rich, which draws the tables, ends with 1 when its reader goes away.
        if isinstance(ending.__context__, BrokenPipeError):
            return _READER_GONE
        raise
    except KeyboardInterrupt:
        # Of ranks, the launcher says so: once for all of them.
        if "RANK" not in os.environ:
            print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except Exception as error:
        return _show(error)
    return code


def leave(code: int) -> NoReturn:
    """End this process with an exit code; what its exit handlers would do, its `with` blocks have done."""
    if code == ExitCode.INTERRUPTED or "RANK" in os.environ:
        # An interrupt inside exec(), which dataclasses use, makes CPython die of SIGINT after an orderly exit (3.11).
        # A thread of gloo's may have the last reference to a tensor that was sent, and frees it, which needs the GIL,
        # when it gets a core: in an interpreter that ends, CPython then unwinds that thread, and the process dies of
        # SIGABRT (torch 2.13, CPython 3.11; gloo's threads at SCHED_IDLE among busy ones: 6 of some 90 ranks). A rank
        # that failed cannot leave its process group in good order at all. Either way the code would be lost.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _has_lost_its_reader() -> bool:
    """Return whether stdout is the pipe that broke; it then leads nowhere, since Python flushes it again at exit."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        is_broken = any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, AttributeError):
        return False  # stdout is no pipe, or this system has no poll
    if is_broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_broken


def _show(error: Exception) -> int:
    if isinstance(error, MeshwrightError):
        logger.debug("traceback", exc_info=error)
        print(fitted(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRA_OF_PACKAGE:
        extra = EXTRA_OF_PACKAGE[error.name]
        print(f"error: this command needs {error.name}: pip install '.[{extra}]'", file=sys.stderr)
        return ExitCode.BAD_INPUT
    traceback.print_exception(error)
    print("error: this is a bug in Meshwright, or in code that the job names (see above)", file=sys.stderr)
    return ExitCode.DO_NOT_RETRY
