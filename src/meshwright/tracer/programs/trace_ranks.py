"""trace(): the real program of one rank, run on fake tensors in a process of its own."""

import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console

from meshwright.errors import UnsupportedError
from meshwright.log import shows_progress
from meshwright.spec.machine.device import Device
from meshwright.spec.trace.trace import Trace
from meshwright.tracer.programs.fork_server import Tracing, fork

_TIMEOUT_S = 1800.0
_PROGRESS_S = 0.5
"""Between looks at which ranks are done."""
_NUM_PROCESSES = 2

DeviceType = Literal["simgpu", "cpu"]
"""What a step is traced on: an accelerator with streams, or a processor, where the host itself computes."""


def device_type_of(device: Device) -> DeviceType:
    """Return what a step for a device is traced on."""
    return "cpu" if device.torch_type == "cpu" else "simgpu"


class Program(NamedTuple):
    """What ranks run."""

    build: str
    """A builder, as module:function, that takes (device, rank, world_size, *arguments) and returns a step, which takes
    nothing.
    """
    world_size: int
    arguments: tuple[str, ...] = ()
    device: DeviceType = "simgpu"
    routing: str = "balanced"
    """How a mixture's tokens are shared out among the ranks of its experts, as tracer/extrapolate/routing.py reads
    it."""
    keeps_earlier: bool = False
    """Whether what the builder and the calls before the traced one communicate is kept, too."""
    numbers_folder: str = ""
    """Where numbers that ranks bring to collectives are kept for ranks that are traced later; "" keeps none."""
    compiles: bool = False
    """Whether the program is known to compile: the compiler is then imported once, and not by each rank."""


def trace(
    build: str,
    rank: int,
    world_size: int,
    arguments: Sequence[str] = (),
    device: DeviceType = "simgpu",
    routing: str = "balanced",
) -> Trace:
    """Return the second step of rank `rank` of `world_size`; `build` and `routing` are Program's.

    Raises UnsupportedError where it cannot be traced, with the operator, the module and the line.
    """
    return trace_ranks(Program(build, world_size, tuple(arguments), device, routing), [rank])[rank]


def trace_ranks(program: Program, ranks: Sequence[int], num_processes: int = _NUM_PROCESSES) -> dict[int, Trace]:
    """Return the second step of each of `ranks`, `num_processes` of them traced at a time; raises as `trace` does."""
    with tempfile.TemporaryDirectory() as folder:
        out = {rank: f"{folder}/{rank}.npz" for rank in ranks}
        report = Path(folder) / "failure.json"
        wanted = {str(rank): file for rank, file in out.items()}
        order = {**program._asdict(), "out": wanted, "failure": str(report), "num_processes": num_processes}
        try:
            code, stderr = _run(order, Path(folder) / "stderr.txt", [Path(file) for file in out.values()])
        except TimeoutError as error:
            raise UnsupportedError(f"{_named(program, ranks)} took longer than {_TIMEOUT_S:.0f} s to trace") from error
        if code != 0:
            failure = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
            why = failure.get("why") or stderr[-3000:] or f"exit code {code}"
            failed = ranks if failure.get("rank") is None else [failure["rank"]]
            raise UnsupportedError(f"{_named(program, failed)} cannot be traced: {why}")
        return {rank: Trace.load(Path(file)) for rank, file in out.items()}


def _run(order: dict[str, Any], stderr: Path, files: Sequence[Path]) -> tuple[int, str]:
    """Return the exit code of a process that writes `files`, one a rank, and its stderr.

    Whatever stops this process stops the ones that it started.
    """
    with _terminable():
        tracing = fork(stderr)
        try:
            tracing.begin(order)
            return _followed(tracing, files), tracing.stderr()
        finally:
            tracing.kill()


def _followed(tracing: Tracing, files: Sequence[Path]) -> int:
    """Return the exit code of a process; a terminal shows meanwhile how many of `files` exist."""
    start_s = time.monotonic()
    with Console(stderr=True, quiet=not shows_progress()).status(f"traced 0 of {len(files)} ranks") as status:
        while (code := tracing.wait(_PROGRESS_S)) is None:
            took_s = time.monotonic() - start_s
            if took_s > _TIMEOUT_S:
                raise TimeoutError
            num_done = sum(file.exists() for file in files)
            status.update(f"traced {num_done} of {len(files)} ranks in {took_s:.0f} s")
    return code


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that processes that were started end with this one; unless it is handled."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _named(program: Program, ranks: Sequence[int]) -> str:
    some = ", ".join(str(rank) for rank in ranks[:5]) + (", ..." if len(ranks) > 5 else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {some} of {program.world_size} of {program.build}"
