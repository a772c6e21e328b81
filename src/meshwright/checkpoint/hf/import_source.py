"""find_source and open_weights: what an import reads, by the source and --config that a user names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.find_checkpoint import config_file, model_folder
from meshwright.checkpoint.hf.find_hf_model import hf_model
from meshwright.checkpoint.hf.hf_model import BuiltInModel, HfModel
from meshwright.checkpoint.hf.weights import HfWeights, load_hf_weights
from meshwright.checkpoint.safetensors.weight_index import CONFIG, read_json
from meshwright.checkpoint.torch_formats.torch_weights import is_torch_checkpoint, load_torch_parameters, require_index
from meshwright.data.tokenizer_files import TOKENIZER
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.spec.job.job import Job
from meshwright.spec.job.user_object import is_object_source
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_from_hf, hf_obstacles
from meshwright.spec.model.hf.hub_cache import local_path


@dataclass(frozen=True)
class ImportSource:
    """Weights that are imported, and what describes them."""

    path: Path
    """A Hugging Face folder, a torch.save file or a torch.distributed.checkpoint folder."""
    is_hf: bool
    config: Path
    """Its config.json, or the one given in place of that."""
    side: Path
    """The folder of the tokenizer and of the generation config."""
    values: dict[str, Any]
    """Those of the config."""


def find_source(source: Path, config: Path | None) -> ImportSource:
    """Return what `source` is; `config`, a config.json or its folder, counts in place of one next to the weights.

    Raises ConfigError where none is found, CheckpointError for a file or folder that is incomplete.
    """
    require_index(source)
    is_hf = not is_torch_checkpoint(source)
    own_side = source.parent if source.is_file() else source
    if config is None and not is_hf and not (own_side / CONFIG).is_file():
        raise ConfigError(
            f"{own_side} has no {CONFIG}, and {source} does not describe its model: give --config FOLDER, the folder "
            "of one"
        )
    file = config_file(own_side if config is None else config)
    path = source if not is_hf else local_path(str(source)) if config is not None else model_folder(source)
    # A copy of the config alone leaves the tokenizer where it is.
    is_next_to_config = not is_hf or (file.parent / TOKENIZER).is_file()
    return ImportSource(path, is_hf, file, file.parent if is_next_to_config else path, read_json(file))


def open_weights(source: ImportSource, job: Job | None) -> tuple[HfModel, HfWeights]:
    """Return the model and the checked weights of `source`; `job` names the model if it is a class of the user's."""
    folder, is_torch = source.path, not source.is_hf
    if job is not None:
        if is_torch or not is_object_source(job.model.source):
            what = f"{folder} is none" if is_torch else f"model.source = {job.model.source!r} is none"
            raise ConfigError(
                f"--job imports a Hugging Face folder into a class of your own (my_module:MyModel), and {what}: leave "
                "--job out for a built-in model, which config.json describes"
            )
        model = hf_model(job.model)
        return model, load_hf_weights(folder, model, dtype=None)
    architecture = architecture_from_hf(source.values, str(source.config))
    _require_way_back(architecture, source.config)
    built_in = BuiltInModel(architecture)
    if is_torch:
        return built_in, load_torch_parameters(folder, architecture, source.values.get("model_type"))
    return built_in, load_hf_weights(folder, built_in, dtype=None)


def _require_way_back(architecture: LlamaArchitecture, config: Path) -> None:
    """Raise UnsupportedError for a model that `export` would refuse."""
    if obstacles := hf_obstacles(architecture):
        raise UnsupportedError(
            f"{config} has a model with {' and '.join(obstacles)}, which no export can describe again, so nothing was "
            "imported: to train from these weights, name this file in model.source and its folder in "
            "model.initial_weights"
        )
