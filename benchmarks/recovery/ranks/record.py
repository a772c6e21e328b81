"""Record of a rank in the folder RUN, in the files of a chaos run, and the kills that RUN/kills.json plans.

ledger/rank-R.jsonl   a line for each finished step: its samples' hash and its time
faults/fault-N.json   that kill N has happened
hash-R                the hash of the final parameters
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

RUN = "RECOVERY_RUN"


class Record:
    """Record of one rank."""

    def __init__(self, rank: int) -> None:
        self._folder, self._rank = Path(os.environ[RUN]), rank
        self._kills: list[list[int]] = json.loads((self._folder / "kills.json").read_text())
        for name in ("ledger", "faults"):
            (self._folder / name).mkdir(exist_ok=True)

    def is_to_die(self, step: int) -> bool:
        """Return whether a kill is planned for this rank in `step` that has not happened."""
        return self._planned(step) is not None

    def maybe_die(self, step: int, phase: str = "backward", damaged: str | None = None) -> None:
        """End this process by SIGKILL where that is planned, having written so, and what was damaged."""
        if (file := self._planned(step)) is not None:
            file.write_text(json.dumps({"time_s": time.time(), "step": step, "mark": phase, "damaged": damaged}))
            os.kill(os.getpid(), signal.SIGKILL)

    def _planned(self, step: int) -> Path | None:
        for number, kill in enumerate(self._kills):
            file = self._folder / "faults" / f"fault-{number}.json"
            if kill == [self._rank, step] and not file.exists():
                return file
        return None

    def step(self, step: int, samples: Iterable[Tensor]) -> None:
        """Write that a step is finished."""
        digest = hashlib.sha256()
        for tensor in samples:
            digest.update(tensor.contiguous().numpy().tobytes())
        line = json.dumps({"step": step, "samples": {0: digest.hexdigest()}, "time_s": time.time()})
        with (self._folder / "ledger" / f"rank-{self._rank}.jsonl").open("a") as file:
            file.write(line + "\n")

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """Write the hash of the final parameters."""
        digest = hashlib.sha256()
        for tensor in parameters:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        (self._folder / f"hash-{self._rank}").write_text(digest.hexdigest())
