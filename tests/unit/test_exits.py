"""How a process ends: a rank without the interpreter's own end, in which gloo's threads may abort it."""

import os
import subprocess
import sys

import pytest

from meshwright.errors import ExitCode

PROGRAM = """
import atexit, os, sys
from meshwright.exits import leave
atexit.register(os.abort)
print("the last line")
leave({code})
"""


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.RETRY])
def test_a_rank_ends_without_finalizing_its_interpreter(code: ExitCode) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code=int(code))],
        env=os.environ | {"RANK": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (code, "the last line\n")


def test_a_command_ends_in_good_order() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    program = PROGRAM.format(code=0).replace("os.abort", "print, 'closed'")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "the last line\nclosed\n")
