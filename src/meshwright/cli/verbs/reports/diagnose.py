"""`meshwright diagnose`: why a run stands still: which rank did not reach which collective; needs no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshwright.cli.result_command import print_json, print_result, result_command
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

    Of a run of independent replicas each is diagnosed in turn: --json then prints a list, by replica.

    Ranks that are alive are asked for what they have entered; of a run that has died, the files that it left are read.
    Exit code 0: it moves, or has ended; 70: it would hang or fail again; 75: start it again with --resume.
    """
    from meshwright.app.reports.diagnose import diagnose, diagnosed_folders

    folders = diagnosed_folders(folder)
    if folders == [folder]:
        diagnosis = diagnose(folder, wait_s=wait_s)
        print_result(diagnosis, as_json)
        sys.exit(exit_code_of(diagnosis))
    found = []
    for one in folders:
        found.append(diagnose(one, wait_s=wait_s))
        if not as_json:
            found[-1].show()
            click.echo()
    if as_json:
        print_json([json.loads(one.to_json()) for one in found])
    sys.exit(worst_exit_code(map(exit_code_of, found)))


def worst_exit_code(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the exit code of several replicas: that of one that would go wrong again, else of one to start again."""
    return max(codes, key=(ExitCode.DONE, ExitCode.RETRY, ExitCode.DO_NOT_RETRY).index)


def exit_code_of(diagnosis: Diagnosis) -> ExitCode:
    """Return what a scheduler is to do with the run."""
    if diagnosis.verdict in _HARMLESS:
        return ExitCode.DONE
    lasts = diagnosis.verdict in _LASTING and not diagnosis.may_pass
    return ExitCode.DO_NOT_RETRY if lasts else ExitCode.RETRY
