"""`meshwright doctor`: what this machine has, what is missing and the command that gets it.

Exit 0: training can run here, or torch is simply not installed (the light install plans without it).
Exit 70: something that training needs is installed but does not work.

Under torchrun it checks the nodes: exit 0 whatever was found, 75 where a node does not answer.
"""

import os
import sys
from pathlib import Path

import click

from meshwright.cli.result_command import print_json, result_command
from meshwright.errors import ExitCode


@result_command
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Under torchrun: a folder that all nodes are to see; default: the working directory.",
)
def command(folder: Path, as_json: bool) -> None:
    """Report what this machine has, what is missing and how to get it.

    Under torchrun on every node: the interface of each path, clocks, limits, and a test between neighbouring nodes.

    Exit code 0: training can run, or torch is not installed; 70: something installed does not work.
    """
    if "RANK" in os.environ:
        _check_cluster(folder, as_json=as_json)
        return
    from meshwright.app.doctor import doctor

    found = doctor()
    if as_json:
        print_json(found.to_dict())
    else:
        found.show()
    if found.is_broken:
        sys.exit(ExitCode.DO_NOT_RETRY)


def _check_cluster(folder: Path, *, as_json: bool) -> None:
    from meshwright.app.cluster_doctor import cluster_doctor

    found = cluster_doctor(folder)
    if found is None:
        return
    if as_json:
        print_json(found.to_dict())
    else:
        found.show()
