"""Run: the folder of a finished or running job, and the manifest in it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from meshwright.spec.frozen import Frozen
from meshwright.spec.job.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.step.estimate import Estimate

_PROFILED_STEP = 10
"""First step that is advised to be profiled, by which a run has warmed up; an earlier one of a shorter run."""


def how_to_profile(job: Job | None = None) -> str:
    """Return how steps are profiled, for a page: a step that the run of `job` has, or any where the job is unknown."""
    start, number = "N", "two"
    if job is not None:
        start = str(max(1, min(_PROFILED_STEP, job.train.last_step - 1)))
        number = "two" if job.train.last_step > 1 else "the one"
    return f"`meshwright profile JOB` profiles a few steps, run.profile_start={start} {number} of a run"


class Run:
    """The paths of a run folder; reading or writing them is others' work."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = self.folder / "manifest.json"
        self.job = self.folder / "job.toml"
        self.metrics = self.folder / "metrics.jsonl"
        self.events = self.folder / "events.jsonl"
        self.findings = self.folder / "findings.jsonl"
        self.checkpoints = self.folder / "checkpoints"
        self.exports = self.folder / "exports"
        self.timelines = self.folder / "timelines"
        self.logs = self.folder / "logs"
        self.compile_cache = self.folder / "compile_cache"
        self.heartbeats = self.folder / "heartbeats"
        self.hangs = self.folder / "hangs"
        self.reference = self.folder / "reference.npz"
        self.memory_owner = self.folder / "memory.json"

    @property
    def names_of_a_start(self) -> set[str]:
        """Return the names of what is in the folder before there is a manifest: a start that fails leaves no more."""
        return {
            *(path.name for path in (self.checkpoints, self.logs, self.heartbeats, self.hangs, self.compile_cache)),
            *(path.name for path in (self.events, self.findings, self.memory_owner)),
            *(path.parent.name for path in (self.memory_snapshot(0), self.injected_fault(0), self.invitation)),
        }

    @property
    def names_of_a_run(self) -> set[str]:
        """Return the names of all that a run writes into its folder, but for its model's config.json and tokenizer."""
        files = (self.manifest, self.job, self.metrics, self.reference)
        folders = (self.exports, self.timelines, self.ledger(0).parent)
        return self.names_of_a_start | {path.name for path in (*files, *folders)}

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step-{step}"

    def export(self, step: int) -> Path:
        """Return the Hugging Face folder that is written of the checkpoint after `step`, with checkpoint.export."""
        return self.exports / f"step-{step}"

    def memory_snapshot(self, rank: int) -> Path:
        """Return the file with the allocator's state on one rank when an allocation failed."""
        return self.folder / "memory" / f"rank-{rank}.pickle"

    def rank_log(self, rank: int) -> Path:
        """Return the log file of one rank."""
        return self.logs / f"rank-{rank}.log"

    def heartbeat(self, rank: int) -> Path:
        """Return the file in which one rank says where it is."""
        return self.heartbeats / f"rank-{rank}.json"

    def flight_record(self, rank: int) -> Path:
        """Return the file in which one rank says what it had asked of its process groups when it hung."""
        return self.hangs / f"rank-{rank}.json"

    def stack(self, rank: int) -> Path:
        """Return the file of one rank's stacks, written from a signal even where Python cannot run."""
        return self.hangs / f"rank-{rank}.stack"

    def injected_fault(self, number: int) -> Path:
        """Return the file that exists once a fault of a chaos run has happened, by its number from 0."""
        return self.folder / "faults" / f"fault-{number}.json"

    def of_replica(self, replica: int) -> "Run":
        """Return the folder of one of several independent replicas: heartbeats, hangs, logs, own checkpoints."""
        return Run(self.folder / "replicas" / str(replica))

    @property
    def invitation(self) -> Path:
        """Return the file by which further replicas can join the run while it trains."""
        return self.folder / "replicas" / "invitation.json"

    def replicas(self) -> list["Run"]:
        """Return the folders of all independent replicas that there were."""
        return [Run(folder) for folder in sorted((self.folder / "replicas").glob("*")) if folder.is_dir()]

    def ledger(self, rank: int) -> Path:
        """Return the file in which one rank of a chaos run says what each finished step was made of."""
        return self.folder / "ledger" / f"rank-{rank}.jsonl"

    @property
    def hang_request(self) -> Path:
        """Return the file whose change asks every rank for its flight record."""
        return self.hangs / "request"

    @property
    def failure(self) -> Path:
        """Return the file that exists once a rank of this attempt has failed."""
        return self.hangs / "failed"

    @property
    def last_diagnosis(self) -> Path:
        """Return the file with the diagnosis of ranks that the launcher killed since another had failed."""
        return self.hangs / "diagnosis.json"

    @property
    def ended_by_signal(self) -> Path:
        """Return the file in which the launcher says which ranks a signal ended."""
        return self.hangs / "signals.json"

    def checkpoint_steps(self) -> list[int]:
        """Return the steps that have a committed checkpoint, oldest first."""
        return _steps_in(self.checkpoints)

    def export_steps(self) -> list[int]:
        """Return the steps that have a complete export, oldest first."""
        return _steps_in(self.exports)


def _steps_in(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    names = (path.name.removeprefix("step-") for path in folder.iterdir() if path.is_dir())
    return sorted(int(name) for name in names if name.isdigit())


class Attempt(Frozen):
    """One start of the ranks: a run that was resumed has several."""

    started_at: str
    """UTC time, ISO 8601."""
    start_step: int
    """Optimizer steps done before this attempt."""
    pids: list[int]
    """Process id of each rank on its host, by rank."""
    hosts: list[str]
    """Host name of each rank, by rank."""
    layout: Layout
    """The concrete layout of this attempt."""
    versions: dict[str, str]
    """Versions of meshwright, Python, torch and others."""
    git_commit: str | None = None
    """Commit of the working directory, with + when it had changes; None outside a repository."""
    exit: int | None = None
    """Exit code of this attempt; None while it runs, or when it was killed before it could say."""


class Manifest(Frozen):
    """Everything needed to say what a run was and how it ended."""

    schema_version: Literal[1] = 1
    """Version of the manifest's format."""
    job: Job
    """The resolved job of the newest attempt."""
    module_dir: str | None = None
    """Folder of the module that model.source names; None for a built-in model."""
    seed: int
    """The seed, as in train.seed."""
    num_parameters: int
    """Parameters of the model, tied ones counted once."""
    data: dict[str, Any] = Field(default_factory=dict)
    """What the data was: source, bytes, samples, and a hash of its content."""
    estimate: Estimate | None = None
    """What the planner predicted; None where no planner ran."""
    attempts: list[Attempt] = Field(default_factory=list)
    """Every start of the ranks, oldest first."""
    results: dict[str, Any] = Field(default_factory=dict)
    """Last step, losses, median and p95 step time, parameter hash."""
    exit: int | None = None
    """Exit code of the newest attempt: 0 done, 2 bad input, 70 do not retry, 75 retry, 130 interrupted."""


def manifest_fault(error: UnicodeDecodeError | ValidationError) -> str:
    """Return in a few words whether a manifest was damaged or cut off, or which key of it another version wrote."""
    if isinstance(error, UnicodeDecodeError):
        return f"is damaged: {error.reason} at byte {error.start}"
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"is damaged or cut off: {first['ctx']['error']}"
    return f"is no manifest of this version ({'.'.join(map(str, first['loc'])) or 'the whole file'}: {first['msg']})"
