"""python traced_programs.py FOLDER MODULE WORLD_SIZE BUILD...: traces rank 1 of programs, in forks of one process.

A build is a function of the module, with arguments after slashes. FOLDER gets a trace (.npz) of each, or the refusal
(.txt). Tests call trace_programs() and trace_of().
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.spec.trace.trace import Trace
from meshwright.tracer.programs import rank_process
from meshwright.tracer.record.untraceable import explained

RANK, WORLD_SIZE = 1, 4


def trace_programs(folder: Path, module: str, *programs: str) -> Path:
    """Fill a folder with what became of each program of a module, on 4 ranks, and return it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(folder), module, str(WORLD_SIZE), *programs]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return folder


def trace_of(folder: Path, program: str) -> Trace:
    """Return a program's trace; fails with the message of one that was refused."""
    file = folder / program.replace("/", "-")
    refusal = file.with_suffix(".txt")
    assert not refusal.exists(), refusal.read_text(encoding="utf-8")
    return Trace.load(file.with_suffix(".npz"))


def ops(found: Trace) -> Counter[str]:
    """Return how often each operator was recorded."""
    return Counter(found.signatures[position].op for position in found.records.signature if position >= 0)


def main() -> None:
    """Trace all that argv names."""
    folder, module, world_size, *builds = sys.argv[1:]
    for build in builds:
        pid = os.fork()
        if not pid:
            _traced(Path(folder) / build.replace("/", "-"), module, int(world_size), build)
        os.waitpid(pid, 0)


def _traced(out: Path, module: str, world_size: int, build: str) -> None:
    code = 1
    try:
        function, *arguments = build.split("/")
        mode = rank_process.prepare("simgpu")
        try:
            with explained(mode.recorder.scopes, mode.numbers.guesses):
                found = rank_process.trace_here(mode, f"{module}:{function}", arguments, RANK, world_size)
                found.save(out.with_suffix(".npz"))
        except MeshwrightError as error:
            out.with_suffix(".txt").write_text(str(error), encoding="utf-8")
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
