"""find_checkpoint: from what a user names, a run or one checkpoint, to the folder of the weights; needs no torch."""

from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.spec.model.hf.hub_cache import hub_advice, local_path
from meshwright.spec.run.run import Run

FILE_NAME = "checkpoint.json"
"""The file of a checkpoint that says what is in it."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file in which PEFT says what an adapter is."""


def is_hugging_face(source: Path) -> bool:
    """Return whether `source` is a Hugging Face folder and neither a run nor a checkpoint."""
    is_ours = (source / FILE_NAME).is_file() or Run(source).manifest.is_file()
    return not is_ours and (source / "config.json").is_file()


def model_folder(source: Path) -> Path:
    """Return the folder of the Hugging Face model that `source` names: a folder, or a hub id in the cache.

    Raises ConfigError where no such folder has a config.json.
    """
    folder = local_path(str(source))
    if not (folder / "config.json").is_file():
        advice = hub_advice(str(source))
        raise ConfigError(f"there is no {folder / 'config.json'}: name the folder of a Hugging Face model{advice}")
    return folder


def config_file(source: Path) -> Path:
    """Return the config.json that `source` is, or that lies in the folder or hub id that it names."""
    return source if source.is_file() else model_folder(source) / "config.json"


def find_checkpoint(source: Path, step: int | None = None) -> tuple[Run, Path]:
    """Return the run and the checkpoint that `source` is or holds: its newest, or that of `step`.

    Raises ConfigError for another kind of folder, a step that it lacks, or a run without any.
    """
    if (source / FILE_NAME).is_file():
        if step is not None and source.name != f"step-{step}":
            raise ConfigError(f"{source} is one checkpoint and --step {step} asks for another: name the run folder")
        return Run(source.parent.parent), source
    run = Run(source)
    if not run.folder.is_dir():
        advice = hub_advice(str(source))
        raise ConfigError(f"there is no folder {run.folder}: name a run folder, such as runs/tiny{advice}")
    steps = run.checkpoint_steps()
    # A mw.CheckpointFolder has checkpoints and no manifest.
    if not steps and not run.manifest.is_file():
        if (run.folder / ADAPTER_CONFIG).is_file():
            raise ConfigError(
                f"{run.folder} is the folder of an adapter, without its base: name the run that trained it, or a whole "
                "model, which `meshwright export RUN FOLDER --merge` writes"
            )
        raise ConfigError(
            f"{run.folder} holds no {run.manifest.name}, so it is no run folder: name one that `meshwright train` or "
            "`meshwright import` wrote"
        )
    if not steps:
        raise ConfigError(f"{run.folder} has no checkpoint yet: train on, or lower checkpoint.interval")
    if step is not None and step not in steps:
        raise ConfigError(f"{run.folder} has no checkpoint of step {step}: it has {', '.join(map(str, steps))}")
    return run, run.checkpoint(steps[-1] if step is None else step)
