"""result_command(): a command with the options that all commands share: --json, --quiet and --verbose."""

import json
import logging
from collections.abc import Callable
from typing import Any, Protocol

import click

from meshwright.log import fitted, logger, progress

HAS_PRINTED = "meshwright.has_printed"
"""Of a click context's meta: whether the JSON of this command is printed."""


class _StandardError(logging.Handler):
    """Writes each record as a line of standard error, wherever that leads now."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        click.echo(fitted(self.format(record)), err=True)


class _Notices(_StandardError):
    """Writes a line that a command repeats, such as one of each of its predictions, once."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()

    def start(self) -> None:
        """Forget what an earlier command of this process has shown."""
        self._shown.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, unless it was."""
        if (text := record.getMessage()) not in self._shown:
            self._shown.add(text)
            super().emit(record)


_progress_handler, _debug_handler, _notice_handler = _StandardError(), _StandardError(), _Notices()
_debug_handler.setFormatter(logging.Formatter("%(levelname)s %(module)s: %(message)s"))


def result_command(function: Callable[..., Any]) -> click.Command:
    """Return `function` as a command; it takes `as_json`, whether its result is to be printed as JSON."""
    command = click.command()(function)
    command.params += [
        click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON, alone on standard output."),
        click.Option(["-q", "--quiet"], is_flag=True, expose_value=False, callback=_quiet, help="Print no progress."),
        click.Option(["-v", "--verbose"], is_flag=True, expose_value=False, callback=_verbose, help="Print debug log."),
    ]
    return command


class _Printable(Protocol):
    def to_json(self) -> str: ...

    def show(self) -> None: ...


def print_result(found: _Printable, as_json: bool) -> None:
    """Print a result that has both forms, as JSON or as a page."""
    if as_json:
        click.echo(found.to_json())
    else:
        found.show()


def print_json(record: object) -> None:
    """Print a result."""
    click.echo(json.dumps(record, indent=2))
    if (context := click.get_current_context(silent=True)) is not None:
        context.meta[HAS_PRINTED] = True


def _quiet(context: click.Context, option: click.Parameter, is_quiet: bool) -> None:
    progress.setLevel(logging.WARNING if is_quiet else logging.INFO)
    progress.addHandler(_progress_handler)
    progress.propagate = False
    _notice_handler.start()
    # For warnings where a command sets up no log of its own.
    _notice_handler.setLevel(logging.ERROR if is_quiet else logging.WARNING)
    logging.lastResort = _notice_handler


def _verbose(context: click.Context, option: click.Parameter, is_verbose: bool) -> None:
    logger.setLevel(logging.DEBUG if is_verbose else logging.NOTSET)
    (logger.addHandler if is_verbose else logger.removeHandler)(_debug_handler)
