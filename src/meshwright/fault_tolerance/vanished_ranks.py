"""vanished_text(): which ranks of this host ended without saying why, for ranks whose launcher does not look.

torchrun takes a rank that ends with 0 in the middle of training, since something in it called exit, for one that is
done, and says nothing of it: those that lost it are the only ones to name it.
"""

import time
from typing import Final

from meshwright.fault_tolerance.diagnosis_text import phase_text
from meshwright.fault_tolerance.evidence import process_state, read_heartbeats
from meshwright.spec.run.rank_records import LAST_PHASES, Heartbeat
from meshwright.spec.run.run import Run

_WAIT_S: Final = 1.0
"""In which a process has ended whose connections are closed."""
_LOOK_S: Final = 0.05


def vanished_text(run: Run) -> str:
    """Return which ranks of `run` on this host ended without saying why, and in which phase; "" where none did.

    For a rank that has lost another; takes a second where none did.
    """
    deadline_s = time.monotonic() + _WAIT_S
    while not (gone := _gone(run)) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    if not gone:
        return ""
    ended = ", ".join(f"rank {beat.rank} (pid {beat.pid}) in {phase_text(beat)}" for beat in gone)
    return (
        f"ended without an error of its own: {ended} (killed, or something in it, such as data.source or a library, "
        "called exit)"
    )


def _gone(run: Run) -> list[Heartbeat]:
    beats = read_heartbeats(run).values()
    return [beat for beat in beats if beat.phase not in LAST_PHASES and process_state(beat) == "gone"]
