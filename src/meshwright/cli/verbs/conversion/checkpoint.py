"""`meshwright checkpoint ...`: list, verify, inspect, compare, clean up and rewrite checkpoints."""

import sys
from pathlib import Path

import click

from meshwright.cli.result_command import print_result, result_command
from meshwright.cli.subcommands import Subcommands
from meshwright.errors import ExitCode

_FOLDER = click.Path(path_type=Path)
_step = click.option("--step", type=click.IntRange(min=0), help="Step of the checkpoint; default: the newest.")


@click.group(cls=Subcommands, subcommand_metavar="COMMAND ...")
def command() -> None:
    """List, verify, compare, clean up or rewrite checkpoints."""


@result_command
@click.argument("run", metavar="RUN", type=_FOLDER)
def _ls(run: Path, as_json: bool) -> None:
    """List what lies in the checkpoints of the run folder RUN: step, size, age, layout, ranks, state, and which rule of
    retention keeps it. Reads no tensor and needs no torch.

    States: complete; damaged (an index or a file's size is wrong); being written; set aside (damaged, renamed by a
    resume); leftover (of a save that was killed: `meshwright checkpoint gc` removes it).
    """
    from meshwright.app.conversion.checkpoints import ls

    found = ls(run)
    print_result(found, as_json)


@result_command
@click.argument("source", metavar="RUN", type=_FOLDER)
@_step
@click.option("--all", "verifies_all", is_flag=True, help="Verify every checkpoint of the run.")
def _verify(source: Path, step: int | None, verifies_all: bool, as_json: bool) -> None:
    """Read every byte of a checkpoint of RUN, a run or checkpoint folder, and compare it with its hash; check that the
    shards cover each tensor exactly once and that all files are of one save. Needs no torch.

    Exit code 0: intact; 70: damaged.
    """
    from meshwright.app.conversion.checkpoints import verify

    found = verify(source, step=step, all=verifies_all)
    print_result(found, as_json)
    if not found.is_intact:
        sys.exit(ExitCode.DO_NOT_RETRY)


@result_command
@click.argument("source", metavar="PATH", type=_FOLDER)
@click.argument("tensor", required=False)
@_step
def _inspect(source: Path, tensor: str | None, step: int | None, as_json: bool) -> None:
    """Show what the checkpoint PATH (or the newest of a run) holds: metadata, versions, sizes, the largest tensors; or
    where TENSOR is stored and its statistics.
    """
    from meshwright.app.conversion.checkpoints import inspect

    found = inspect(source, tensor, step=step)
    print_result(found, as_json)


@result_command
@click.argument("left", type=_FOLDER)
@click.argument("right", type=_FOLDER)
def _diff(left: Path, right: Path, as_json: bool) -> None:
    """Compare two checkpoints (a run names its newest): metadata, tensors added, removed and changed, with the largest
    and the mean difference. They may be of different layouts. Holds a few shards in memory at a time.
    """
    from meshwright.app.conversion.checkpoints import diff

    found = diff(left, right)
    print_result(found, as_json)


@result_command
@click.argument("run", metavar="RUN", type=_FOLDER)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--damaged", is_flag=True, help="Also remove damaged checkpoints that a resume set aside.")
@click.option("--memory", is_flag=True, help="Also remove copies in memory that a resume would read.")
def _gc(run: Path, dry_run: bool, damaged: bool, memory: bool, as_json: bool) -> None:
    """Remove from RUN what saves that were killed left, and checkpoints that its retention no longer keeps.

    Takes the lock of the run folder that training takes. While a process trains into RUN, only set-aside checkpoints
    can be removed: that process removes the rest itself. Of copies in memory, those on this machine are removed: of
    runs that are gone, and of RUN where its checkpoints are as new.
    """
    from meshwright.app.conversion.checkpoints import gc

    found = gc(run, dry_run=dry_run, damaged=damaged, memory=memory)
    print_result(found, as_json)


@result_command
@click.argument("source", type=_FOLDER)
@click.argument("destination", type=_FOLDER)
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="Ranks that are to load it; a file for each.")
def _reshard(source: Path, destination: Path, ranks: int, as_json: bool) -> None:
    """Rewrite the checkpoint SOURCE (a run names its newest) as the new folder DESTINATION, with the files of N ranks.

    Any layout loads any checkpoint: this is never needed to resume. It makes loading faster, since each of N
    data-parallel ranks then reads its own file and no other, and makes fewer files of many. The copy is verified, and
    `meshwright checkpoint diff` finds it bitwise equal.
    """
    from meshwright.app.conversion.checkpoints import reshard

    found = reshard(source, destination, ranks=ranks)
    print_result(found, as_json)


_VERBS = {"ls": _ls, "verify": _verify, "diff": _diff, "gc": _gc, "reshard": _reshard, "inspect": _inspect}
for _name, _command in _VERBS.items():
    command.add_command(_command, _name)
