"""note_injection(): that a fault happens, on disk before it does."""

import time

from meshwright.checkpoint.format.durable import temporary_sibling, write_durably
from meshwright.spec.run.chaos_report import Injection
from meshwright.spec.run.run import Run


def note_injection(run: Run, number: int, step: int, mark: str, damaged: str | None = None) -> None:
    """Write that fault `number` happens now, so that neither another attempt nor another process repeats it."""
    file = run.injected_fault(number)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(file)
    write_durably(temporary, Injection(time_s=time.time(), step=step, mark=mark, damaged=damaged).to_json())
    temporary.replace(file)
