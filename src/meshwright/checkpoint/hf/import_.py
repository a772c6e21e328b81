"""Import of a Hugging Face folder as a run, which every command that reads a run accepts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.checkpoint import save
from meshwright.checkpoint.durable import commit, temporary_sibling, write_durably
from meshwright.checkpoint.hf.families import num_parameters
from meshwright.checkpoint.hf.folder import read_json
from meshwright.checkpoint.hf.side_files import CONFIG, TOKENIZER, copy_side_files
from meshwright.checkpoint.hf.weights import load_hf_parameters
from meshwright.checkpoint.saved_model import IMPORTED_FROM
from meshwright.config.write import to_toml
from meshwright.errors import CheckpointError, ConfigError, ExitCode
from meshwright.spec.job.job import Job
from meshwright.spec.model.architecture import LlamaArchitecture
from meshwright.spec.model.hf.hf_config import architecture_from_hf
from meshwright.spec.model.hf.hub_cache import hub_advice, local_path
from meshwright.spec.run.run import Manifest, Run


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    run: Run
    architecture: LlamaArchitecture
    num_parameters: int
    dtypes: list[str]


def import_folder(hf_folder: Path, run_folder: Path) -> Imported:
    """Write the weights of `hf_folder`, bitwise unchanged, as checkpoint step-0 of the new run `run_folder`.

    `hf_folder` may also be the hub id of a downloaded model. The run is created atomically. Its job names `hf_folder`
    as initial_weights, so training from it starts with a copy of job.toml. Raises ConfigError if `run_folder` exists,
    CheckpointError for a damaged folder, UnsupportedError for an unknown model.
    """
    if run_folder.exists():
        raise ConfigError(f"{run_folder} exists, and import never overwrites: name a new folder, or move it away")
    named, hf_folder = str(hf_folder), local_path(str(hf_folder))
    if not hf_folder.exists() and (advice := hub_advice(named)):
        raise ConfigError(f"there is no folder {named}: name the folder of a Hugging Face model{advice}")
    config = read_json(hf_folder / CONFIG)
    architecture = architecture_from_hf(config, str(hf_folder / CONFIG))
    # As stored and memory-mapped, except stacked experts, which are copies.
    parameters = dict(load_hf_parameters(hf_folder, architecture, dtype=None))
    count = num_parameters(architecture)
    temporary = temporary_sibling(run_folder)
    run = Run(temporary)
    try:
        temporary.mkdir(parents=True)
        copy_side_files(hf_folder, temporary)
        save(run.checkpoint(0), {"model": parameters}, {"step": 0, IMPORTED_FROM: named})
        job = _job(named, run_folder, has_tokenizer=(temporary / TOKENIZER).is_file())
        manifest = Manifest(job=job, seed=job.train.seed, num_parameters=count, exit=ExitCode.DONE)
        write_durably(run.manifest, manifest.to_json())
        write_durably(run.job, to_toml(job))
        commit(temporary, run_folder)
    except OSError as error:
        raise CheckpointError(
            f"{run_folder} could not be written ({error.strerror}), and was removed: free space there, or name a "
            "folder that you may write"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters.values()})
    return Imported(Run(run_folder), architecture, count, dtypes)


def _job(weights: str, run_folder: Path, *, has_tokenizer: bool) -> Job:
    return Job.from_dict(
        {
            "model": {"source": str(run_folder / CONFIG), "initial_weights": weights},
            "data": {"tokenizer": str(run_folder / TOKENIZER)} if has_tokenizer else {},
            # -1: sharded over all ranks.
            "layout": {"dp_shard": -1},
        }
    )
