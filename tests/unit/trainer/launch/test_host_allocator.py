"""Memory that a rank on a processor frees stays with it."""

import platform
import subprocess
import sys

import pytest

from meshwright.trainer.launch.local.host_allocator import keep_freed_memory

_PROGRAM = """
import resource, sys
from meshwright.trainer.launch.local.host_allocator import keep_freed_memory
assert not sys.argv[1:] or keep_freed_memory({})
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (8 << 20) for _ in range(10)]
    del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_blocks_of_a_step_are_not_faulted_in_again() -> None:
    faults = {}
    for arguments in ((), ("keep",)):
        ended = subprocess.run((sys.executable, "-c", _PROGRAM, *arguments), capture_output=True, text=True, check=True)
        faults[arguments] = int(ended.stdout)
    # 80 MB are 20,480 pages of 4 KiB, and at least 40 of 2 MiB.
    assert faults["keep",] == 0
    assert faults[()] >= 40


def test_settings_of_the_user_are_kept() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
