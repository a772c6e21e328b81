"""`meshwright diagnose`: why a run stands still: which rank did not reach which collective; needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.result_command import print_result, result_command
from meshwright.errors import ExitCode

if TYPE_CHECKING:
    from meshwright.spec.run.rank_records import Diagnosis

_HARMLESS = ("ended", "moving")
# The same command would go wrong in the same place.
_LASTING = ("departed", "mismatch", "failed")


@result_command
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--wait", "wait_s", type=float, default=5.0, show_default=True, help="Seconds to wait for the ranks.")
def command(folder: Path, wait_s: float, as_json: bool) -> None:
    """Find why the run in RUN_FOLDER hangs: which rank did not reach which collective, in which layer.

    Ranks that are alive are asked for what they have entered; of a run that has died, the files that it left are read.
    Exit code 0: it moves, or has ended; 70: it would hang or fail again; 75: start it again with --resume.
    """
    from meshwright.app.reports.diagnose import diagnose

    diagnosis = diagnose(folder, wait_s=wait_s)
    print_result(diagnosis, as_json)
    sys.exit(exit_code_of(diagnosis))


def exit_code_of(diagnosis: Diagnosis) -> ExitCode:
    """Return what a scheduler is to do with the run."""
    if diagnosis.verdict in _HARMLESS:
        return ExitCode.DONE
    lasts = diagnosis.verdict in _LASTING and not diagnosis.may_pass
    return ExitCode.DO_NOT_RETRY if lasts else ExitCode.RETRY
