"""find_saved_model: from what a user names, a run or one checkpoint, to the weights and what is known about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from meshwright.checkpoint.find_checkpoint import find_checkpoint
from meshwright.checkpoint.load import read_metadata
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.run.run import Manifest, Run

IMPORTED_FROM = "imported_from"
"""The metadata key of a checkpoint whose weights came from a Hugging Face folder; its value is that folder's name."""


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint of a model of ours, and the run that it belongs to."""

    checkpoint: Path
    run: Run
    job: Job
    architecture: LlamaArchitecture
    is_imported: bool
    """Whether the weights are those of a Hugging Face folder, whose other files then lie in the run folder."""

    def load_tokenizer(self) -> Tokenizer | None:
        """Return what the model was trained with; None where nobody said: data of the user's own, or weights alone."""
        own = self.run.folder / "tokenizer.json"
        if own.is_file():
            return load_tokenizer(str(own))
        if self.is_imported or is_object_source(self.job.data.source):
            return None
        return load_tokenizer(self.job.data.tokenizer)


def find_saved_model(source: Path, step: int | None = None) -> SavedModel:
    """Return the model in `source`: a run folder (its newest checkpoint, or that of `step`) or a checkpoint folder.

    Raises ConfigError for another kind of folder, CheckpointError for a damaged one, UnsupportedError for a model class
    of the user's own.
    """
    run, checkpoint = find_checkpoint(source, step)
    job = _read_job(run)
    config = run.folder / "config.json"
    # A run folder that holds its model's config may be moved, whatever path its job names.
    section = job.model.replace(source=str(config), options={}) if config.is_file() else job.model
    architecture = resolve_architecture(section)
    if architecture is None:
        raise UnsupportedError(
            f"{run.folder} trained {job.model.source}, a class of your own, and only models of ours are known "
            f"here: read its tensors with meshwright.checkpoint.load.load_parameters({str(checkpoint)!r})"
        )
    return SavedModel(checkpoint, run, job, architecture, IMPORTED_FROM in read_metadata(checkpoint))


def _read_job(run: Run) -> Job:
    try:
        return Manifest.from_json(run.manifest.read_text(encoding="utf-8")).job
    except FileNotFoundError:
        raise ConfigError(f"there is no {run.manifest}, which says what the model is: put it back") from None
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{run.manifest} cannot be read as a manifest ({error}): restore it from a copy") from error
