"""`meshwright doctor`: what this machine has, what is missing and the command that gets it.

Exit 0: training can run here, or torch is simply not installed (the light install plans without it).
Exit 70: something that training needs is installed but does not work.
"""

import sys

from meshwright.cli.result_command import print_json, result_command
from meshwright.errors import ExitCode


@result_command
def command(as_json: bool) -> None:
    """Report what this machine has, what is missing and how to get it.

    Exit code 0: training can run, or torch is not installed; 70: something installed does not work.
    """
    from meshwright.app.doctor import doctor

    found = doctor()
    if as_json:
        print_json(found.to_dict())
    else:
        found.show()
    if found.is_broken:
        sys.exit(ExitCode.DO_NOT_RETRY)
