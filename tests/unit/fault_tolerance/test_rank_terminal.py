"""What a rank that hangs says reaches the terminal that its output has left, with the line that it hangs in."""

import subprocess
import sys
from pathlib import Path

from meshwright.errors import ExitCode
from meshwright.spec.run.run import Run
from meshwright.spec.run.run_events import read_events

RANK = """
import os, sys, time
from pathlib import Path
from meshwright.fault_tolerance.hangs import hang_watch
from meshwright.fault_tolerance.rank_terminal import keep_terminal
from meshwright.spec.job.sections import RunSection
from meshwright.spec.run.run import Run
folder = Path(sys.argv[1])
hang_watch._END_AFTER_S = 0.0
with hang_watch.HangWatch(Run(folder), 1, 2, RunSection(hang_after_s=0.4, hang_limit_s=1.0)) as watch:
    for step in range(1, 5):
        watch.begin_step(step)
    keep_terminal(os.dup(2))
    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
    time.sleep(1000)
"""


def test_a_rank_that_ends_for_a_hang_says_so_in_the_terminal_and_in_its_log(tmp_path: Path) -> None:
    program = tmp_path / "stuck.py"
    program.write_text(RANK)
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], stderr=subprocess.PIPE, text=True, timeout=600
    )
    assert ended.returncode == ExitCode.RETRY
    (line,) = [line for line in ended.stderr.splitlines() if "has not moved" in line]
    assert line.startswith("rank 1 has not moved for ")
    assert line.endswith(f"at {program}:{RANK.splitlines().index('    time.sleep(1000)') + 1} in <module>: it ends")
    assert line in (tmp_path / "log").read_text()
    assert [event.kind for event in read_events(Run(tmp_path))] == ["hang"]
