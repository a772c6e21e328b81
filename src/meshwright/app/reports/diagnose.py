"""diagnose: why a run stands still; needs no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.console import RenderableType

from meshwright.app.arguments import checked
from meshwright.app.results.result import Result, viewed
from meshwright.errors import ConfigError
from meshwright.fault_tolerance.diagnose import diagnose as _diagnose
from meshwright.fault_tolerance.evidence import ask, look
from meshwright.fault_tolerance.hangs.launcher_watch import last_diagnosis
from meshwright.pages.tables.diagnosis_table import diagnosis_page
from meshwright.spec.run.finding import finding_lines, read_findings
from meshwright.spec.run.rank_records import Diagnosis
from meshwright.spec.run.run import Run
from meshwright.units import first_of


class DiagnosisResult(Result, Diagnosis):
    """A diagnosis with its views. Data frame: a row for each rank."""

    folder: str = Field("", exclude=True)
    """The run's folder."""

    def _summary(self) -> str:
        return f"Diagnosis {self.folder}: {self.verdict}: {self.headline}"

    def _page(self) -> Iterator[RenderableType]:
        return diagnosis_page(self.folder, self)

    def _rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.ranks]

    def _piped_width(self) -> int:
        return 140


def diagnosed_folders(folder: Path) -> list[Path]:
    """Return the folders to diagnose one by one: `folder`, or those of its independent replicas that have started."""
    if any(Run(folder).heartbeats.glob("rank-*.json")):
        return [folder]
    return [one.folder for one in Run(folder).replicas() if any(one.heartbeats.glob("rank-*.json"))] or [folder]


@checked
def diagnose(
    folder: Path | str, *, wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
) -> DiagnosisResult:
    """Return which rank of the run in `folder` did not reach which collective, and in which module.

    Ranks that are alive are asked for what they have entered, and have `wait_s` seconds to answer; of a run that has
    died, the files that it left are read. Raises ConfigError where no rank has started.
    """
    run = Run(folder)
    ask(run, wait_s)
    evidence = look(run)
    replicas = sorted(path for path in (run.folder / "replicas").glob("*") if path.is_dir())
    if not evidence.heartbeats and replicas:
        raise ConfigError(
            f"{folder} is of independent replicas, each with a folder of its own: name one of "
            f"{first_of([str(path) for path in replicas])}"
        )
    if not evidence.heartbeats:
        raise ConfigError(
            f"{folder} holds no heartbeat of a rank: name the folder of a run (run.dir, by default runs/NAME) whose "
            "ranks have started"
        )
    found = last_diagnosis(run, evidence) or _diagnose(evidence)
    # Of earlier steps, and of a rank that may be slow no more: evidence, no verdict.
    found = found.replace(evidence=[*found.evidence, *finding_lines(read_findings(run.findings))])
    return viewed(DiagnosisResult, found, folder=str(folder))
