"""python -m benchmarks.checkpoints.kills: does kill -9 at any boundary of a save lose the newest committed checkpoint?

A library that is preloaded counts the calls of write, fsync, rename, open for writing, mkdir and unlink in the folder
of the checkpoints, and kills the process before the n-th. For each n a fork saves step 2 of a run that has step 1,
removes the older as retention does, and is killed. Then another process loads the newest: it must find all bits of step
1, or all of step 2 if that has its name, and the next save must work. The control overwrites one folder with DCP, as
its examples do. Needs a C compiler. Exit code 1 if ours loses a checkpoint, or if the control loses none: then the
oracle would be blind.

Expected, written before the first run: ours about 20 boundaries, none lost; DCP loses the checkpoint at some.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints.states import DCP, State, equal, make_state, zeros_like
from meshwright.checkpoint.checkpoint import load_newest, save
from meshwright.checkpoint.prune import prune
from meshwright.spec.run.retention import RetentionRule
from meshwright.spec.run.run import Run

SOURCE = Path(__file__).with_name("kill_at.c")
NUM_ELEMENTS = 60_000


def save_ours(folder: Path, state: State, step: int) -> None:
    """Save a step and keep only the newest."""
    run = Run(folder)
    save(run.checkpoint(step), state, {"step": step})
    prune(run, RetentionRule(keep=1))


def load_ours(folder: Path, state: State) -> None:
    """Load the newest whole step, and save another."""
    run = Run(folder)
    newest = run.checkpoint_steps()[-1]
    found = load_newest(run, state)
    assert found is not None
    assert found[0] == newest, "the newest was set aside"
    save(run.checkpoint(3), state, {"step": 3})


def save_dcp(folder: Path, state: State, step: int) -> None:
    """Overwrite the one checkpoint."""
    DCP.save(folder, state)


FORMATS: dict[str, tuple[Callable[[Path, State, int], None], Callable[[Path, State], None]]] = {
    "meshwright": (save_ours, load_ours),
    "torch DCP, overwriting": (save_dcp, DCP.load),
}


def main() -> int:
    """Print the table; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kill_at.so"
        if os.environ.get("LD_PRELOAD") is None:
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
            command = [sys.executable, "-m", "benchmarks.checkpoints.kills"]
            return subprocess.run(command, env=os.environ | {"LD_PRELOAD": str(library)}, check=False).returncode
        logging.disable(logging.CRITICAL)
        table = Table("format", "boundaries", "newest lost", title="Kill -9 before each call that changes the folder")
        lost = {}
        for name in FORMATS:
            outcomes = kill_everywhere(name, Path(folder) / "run")
            lost[name] = [outcome for outcome in outcomes if outcome is not None]
            table.add_row(name, str(len(outcomes)), f"{len(lost[name])} {sorted(set(lost[name]))}")
        Console().print(table)
    ours, control = lost.values()
    return 1 if ours or not control else 0


def kill_everywhere(name: str, folder: Path) -> list[str | None]:
    """Return for each boundary None, or what a load after the kill did wrong."""
    save_step, load_step = FORMATS[name]
    states = {step: make_state(step, NUM_ELEMENTS) for step in (1, 2)}
    shutil.rmtree(folder, ignore_errors=True)
    save_step(folder, states[1], 1)
    kept = shutil.copytree(folder, folder.with_name("kept"), dirs_exist_ok=True)
    num_calls = _in_fork(lambda: _counted(folder, lambda: save_step(folder, states[2], 2)))
    outcomes = []
    for n in range(num_calls):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        _in_fork(partial(_killed, n, folder, lambda: save_step(folder, states[2], 2)))
        found = zeros_like(states[1])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_step(folder, found)
            outcomes.append(None if any(equal(found, state) for state in states.values()) else "mixed bits")
        except BaseException as error:  # DCP's is none of Exception's
            outcomes.append(f"no load: {type(error).__name__}")
    shutil.rmtree(kept)
    return outcomes


def _counted(folder: Path, act: Callable[[], None]) -> int:
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.kill_at(ctypes.c_long(-1), str(folder).encode())
    act()
    return int(shim.num_calls())


def _killed(n: int, folder: Path, act: Callable[[], None]) -> int:
    ctypes.CDLL(os.environ["LD_PRELOAD"]).kill_at(ctypes.c_long(n), str(folder).encode())
    act()
    return 0


def _in_fork(act: Callable[[], int]) -> int:
    """Return what `act` returns in a fork; 0 if that was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        warnings.simplefilter("ignore")
        try:
            os.write(writing, str(act()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return int(text or 0)


if __name__ == "__main__":
    sys.exit(main())
