"""Lookup of a saved model: from a run or checkpoint folder to weights, job and architecture."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from meshwright.checkpoint.checkpoint import read_metadata
from meshwright.checkpoint.format.find_checkpoint import find_checkpoint
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import CheckpointError, ConfigError, UnsupportedError
from meshwright.spec.job.job import Job
from meshwright.spec.job.sections import ModelSection
from meshwright.spec.job.user_object import find_modules_in, is_object_source
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.model_source import resolve_architecture
from meshwright.spec.model.unseen_fields import differing_fields
from meshwright.spec.run.run import Manifest, Run, manifest_fault

MODEL_FIELDS = "model"
"""Metadata key of the model's fields that change no shape; None for a class of the user's."""
IMPORTED_FROM = "imported_from"
"""Metadata key of an imported checkpoint: the Hugging Face folder of its weights."""


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint of a model, and its run."""

    checkpoint: Path
    run: Run
    job: Job
    section: ModelSection
    """What the model is: the run folder's config.json where it has one, else the job's [model]."""
    built_in: LlamaArchitecture | None
    """None for a class of the user's."""
    is_imported: bool
    """Whether the weights were imported from a Hugging Face folder, whose other files are in the run folder."""

    @property
    def architecture(self) -> LlamaArchitecture:
        """Return the architecture of a built-in model; raises UnsupportedError for a class of the user's."""
        if self.built_in is None:
            raise UnsupportedError(
                f"{self.run.folder} trained the class {self.section.source}: only built-in models are supported here; "
                "export it and name that folder, or read its tensors with "
                f"meshwright.checkpoint.checkpoint.load_parameters(Path({str(self.checkpoint)!r}))"
            )
        return self.built_in

    def load_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None for user data and for imported weights without one."""
        own = self.run.folder / "tokenizer.json"
        if own.is_file():
            return load_tokenizer(str(own))
        if self.is_imported or is_object_source(self.job.data.source):
            return None
        return load_tokenizer(self.job.data.tokenizer)


def find_saved_model(source: Path, step: int | None = None) -> SavedModel:
    """Return the model in `source`: a run folder (its newest checkpoint, or that of `step`) or a checkpoint folder.

    Raises ConfigError for another kind of folder, CheckpointError for a damaged one.
    """
    run, checkpoint = find_checkpoint(source, step)
    manifest = _read_manifest(run)
    job, config = manifest.job, run.folder / "config.json"
    section = job.model
    if is_object_source(section.source):
        find_modules_in(manifest.module_dir)
    elif config.is_file():
        # The run folder's own config comes first: the folder may have been moved.
        section = section.replace(source=str(config), options={})
    metadata, architecture = read_metadata(checkpoint), resolve_architecture(section)
    if (changed := differing_fields(metadata.get(MODEL_FIELDS), architecture)) is not None:
        raise CheckpointError(
            f"{checkpoint} was trained as another model than {run.folder} says: {changed}: put back the run's "
            "config.json and manifest.json, or the checkpoint's own run"
        )
    return SavedModel(checkpoint, run, job, section, architecture, IMPORTED_FROM in metadata)


def _read_manifest(run: Run) -> Manifest:
    try:
        return Manifest.from_json(run.manifest.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {run.manifest}, which says what the model is: put it back") from None
    except OSError as error:
        raise ConfigError(f"{run.manifest} cannot be read ({error.strerror}): restore it from a copy") from error
    except (UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(f"{run.manifest} {manifest_fault(error)}: restore it from a copy") from error
