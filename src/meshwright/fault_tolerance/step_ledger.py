"""StepLedger: which samples each finished step of a rank has used, on disk after every step of a chaos run."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash
from torch import Tensor

from meshwright.data.loader import Microbatch
from meshwright.spec.run.chaos_report import LedgerEntry
from meshwright.spec.run.run import Run


class StepLedger:
    """Ledger of one rank, to which every attempt appends; use it in a `with`."""

    def __init__(self, run: Run, rank: int) -> None:
        file = run.ledger(rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self.last_step = max((entry.step for entry in read_ledger(file)), default=0)
        """The furthest that an earlier attempt came."""
        self._file = file.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, step: int, microbatches: Iterable[Microbatch], epoch: int = 0, *, is_finished: bool = True) -> None:
        """Note that `step` is done, or about to be, on these samples, with the quorum of an epoch."""
        samples = {slot: digest for one in microbatches for slot, digest in digests(one).items()}
        entry = LedgerEntry(step=step, samples=samples, time_s=time.time(), epoch=epoch, is_finished=is_finished)
        self._file.write(entry.model_dump_json() + "\n")
        self._file.flush()


def digests(microbatch: Microbatch) -> dict[int, str]:
    """Return a hash of all that each sample is trained by, by its slot in the global batch."""
    parts = [one for one in (microbatch.inputs, microbatch.targets, microbatch.documents) if one is not None]
    return {
        microbatch.first_slot + place: _digest([part[place] for part in parts])
        for place in range(len(microbatch.inputs))
    }


def _digest(sample: Iterable[Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for part in sample:
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_ledger(path: Path) -> list[LedgerEntry]:
    """Return the entries of a rank's ledger, oldest first; what a killed rank has half written is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [LedgerEntry.from_json(line) for line in lines if line.endswith("\n")]
