"""diagnose: why a run stands still; needs no torch."""

from __future__ import annotations

from pathlib import Path

from meshwright.app.results.diagnosis_result import DiagnosisResult
from meshwright.app.results.result import viewed
from meshwright.errors import ConfigError
from meshwright.fault_tolerance.diagnose import diagnose as _diagnose
from meshwright.fault_tolerance.evidence import ask, look
from meshwright.fault_tolerance.launcher_watch import last_diagnosis
from meshwright.spec.run.run import Run


def diagnose(folder: Path | str, *, wait_s: float = 5.0) -> DiagnosisResult:
    """Return which rank of the run in `folder` did not reach which collective, and in which module.

    Ranks that are alive are asked for what they have entered, and have `wait_s` seconds to answer; of a run that has
    died, the files that it left are read. Raises ConfigError where no rank has started.
    """
    run = Run(folder)
    ask(run, wait_s)
    evidence = look(run)
    if not evidence.heartbeats:
        raise ConfigError(
            f"{folder} holds no heartbeat of a rank: name the folder of a run (run.dir, by default runs/NAME) whose "
            "ranks have started"
        )
    found = last_diagnosis(run, evidence) or _diagnose(evidence)
    return viewed(DiagnosisResult, found, folder=str(folder))
