"""import_weights: weights of a Hugging Face folder, or a checkpoint of torch, as a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from meshwright.app.arguments import JobSource, Positive, checked
from meshwright.app.conversion.conversion_ranks import share
from meshwright.app.job.jobs import as_job
from meshwright.app.progress import elapsed
from meshwright.app.results.result import Result
from meshwright.checkpoint.hf.import_ import Imported, import_folder
from meshwright.config.paths import with_absolute_paths
from meshwright.data.tokenizer_files import TOKENIZER
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import find_modules_in, is_object_source
from meshwright.units import counted, first_of, format_count


@dataclass(frozen=True, repr=False)
class Import(Result):
    """A run that was made of foreign weights. Data frame: one row."""

    source: Path
    run: Path
    checkpoint: Path
    num_parameters: int
    dtypes: list[str]
    dropped: dict[str, list[str]]
    """Tensors of the source that are not in the checkpoint, by reason."""
    next_step: str
    """The command that uses it."""

    def to_json(self) -> str:
        """Return what `meshwright import --json` prints."""
        found = {"checkpoint": str(self.checkpoint), "num_parameters": self.num_parameters, "dtypes": self.dtypes}
        return json.dumps({**found, "dropped": self.dropped}, indent=2)

    def _summary(self) -> str:
        parameters = f"{format_count(self.num_parameters)} parameters in {' and '.join(self.dtypes)}"
        return f"Import {self.source} -> {self.checkpoint}: {parameters}"

    def _page(self) -> Iterator[Text]:
        yield Text(self._summary().removeprefix("Import "))
        for reason, names in self.dropped.items():
            yield Text(f"dropped {counted(len(names), 'tensor')} ({first_of(names, 2)}): {reason}")
        yield Text(f"next: {self.next_step}")

    def _rows(self) -> list[dict[str, Any]]:
        return [{**vars(self), "dropped": sum(map(len, self.dropped.values()))}]


@checked
def import_weights(
    source: Path | str,
    run_folder: Path | str,
    *,
    config: Path | str | None = None,
    job: JobSource | None = None,
    overwrite: bool = False,
    ranks: Positive = 1,
) -> Import:
    """Write the weights of `source`, bit by bit, as checkpoint step-0 of the new run `run_folder`.

    `source` is a Hugging Face folder, the id of a downloaded model, a torch.save file or a DCP folder; `config` is its
    config.json, or the folder of that and the tokenizer, if another. `job` names a class of your own with a table in
    its attribute `hugging_face`. With `overwrite` an import that was not trained may be replaced. `ranks` processes
    share the work. Raises ConfigError if `run_folder` exists, CheckpointError for a damaged source or tensors of
    another model, UnsupportedError for a model that is neither built in nor has a table.
    """
    arguments = import_arguments(source, run_folder, config=config, job=job, overwrite=overwrite)
    with elapsed(f"writing {run_folder}"):
        return import_result(Path(source), share(import_folder, arguments, ranks, Path(run_folder)))


def import_arguments(
    source: Path | str,
    run_folder: Path | str,
    *,
    config: Path | str | None,
    job: JobSource | None,
    overwrite: bool,
) -> dict[str, Any]:
    """Return the arguments of `import_folder`; modules that `job` names are found from now on."""
    own = None if job is None else _with_module(job)
    return {
        "source": Path(source),
        "run_folder": Path(run_folder),
        "config": None if config is None else Path(config),
        "job": own,
        "overwrite": overwrite,
    }


def import_result(source: Path, done: Imported) -> Import:
    """Return the result of an import of `source`."""
    is_own = is_object_source(done.job.model.source)
    export = f"meshwright export {done.run.folder} HF_FOLDER, then set model.initial_weights to HF_FOLDER"
    train = f"meshwright train {done.run.job} run.dir=NEW" if done.job.model.initial_weights else export
    can_generate = not is_own and (done.run.folder / TOKENIZER).is_file()
    generate = f"meshwright generate {done.run.folder}, or train from it: " * can_generate
    return Import(
        source=source,
        run=done.run.folder,
        checkpoint=done.run.checkpoint(0),
        num_parameters=done.num_parameters,
        dtypes=done.dtypes,
        dropped=done.dropped,
        next_step=generate + train,
    )


def _with_module(job: JobSource) -> Job:
    """Return a job whose module, which may lie next to the job file, can be imported from anywhere."""
    resolved = as_job(job)
    find_modules_in(str(resolved.folder.resolve()))
    return with_absolute_paths(resolved.job)
