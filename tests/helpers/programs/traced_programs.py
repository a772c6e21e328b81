"""python traced_programs.py FOLDER MODULE WORLD_SIZE BUILD...: traces rank 1 of programs, in forks of one process.

A build is a function of the module, with arguments after slashes. FOLDER gets a trace (.npz) of each, or the refusal
(.txt).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.tracer.programs import rank_process
from meshwright.tracer.record.untraceable import explained

RANK = 1


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
