"""join: one more replica for a run that trains."""

from pathlib import Path

from meshwright.app.arguments import checked
from meshwright.app.results.run_result import TrainedRun
from meshwright.errors import ConfigError
from meshwright.spec.run.run import Run


@checked
def join(run: str | Path) -> TrainedRun:
    """Train as one more replica of `run`, the folder of a run with independent replicas; return how it ended.

    The replica gets its state from another one, and a share of each batch; it may leave at any time. Raises ConfigError
    where no such run trains there, Retryable where its launcher does not answer.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give the run folder of a run that trains")
    from meshwright.trainer.launch.replicas.joining import join as join_run

    return TrainedRun(folder, join_run(Run(folder)))
