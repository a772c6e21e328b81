"""Storage faults of a chaos run: where its process, and the one that writes its checkpoints, get them from."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from meshwright.checkpoint.background import writer_process
from meshwright.fault_tolerance.storage.faulty_disk import FaultyDisk
from meshwright.spec.fault import Fault
from meshwright.spec.run.run import Run

_VARIABLE: Final = "MESHWRIGHT_DISK_FAULTS"


@contextmanager
def under_disk_faults(run: Run, rank: int, faults: Sequence[Fault], last_step: int) -> Iterator[None]:
    """Let calls of this rank on checkpoints fail as `faults` say, also those of its writer process."""
    pending = {number: fault for number, fault in enumerate(faults) if fault.rank == rank and fault.is_of_disk}
    if not pending:
        yield
        return
    given = {number: fault.to_dict() for number, fault in pending.items()}
    os.environ[_VARIABLE] = json.dumps({"run": str(run.folder.absolute()), "faults": given})
    module, writer_process.MODULE = writer_process.MODULE, __name__
    try:
        with FaultyDisk(run, pending, last_step):
            yield
    finally:
        writer_process.MODULE = module
        del os.environ[_VARIABLE]


def main(options: dict[str, Any]) -> None:
    """Be the writer process of a rank, on its faulty disk."""
    given = json.loads(os.environ[_VARIABLE])
    faults = {int(number): Fault.from_dict(fault) for number, fault in given["faults"].items()}
    with FaultyDisk(Run(Path(given["run"])), faults, last_step=0):
        writer_process.main(options)
