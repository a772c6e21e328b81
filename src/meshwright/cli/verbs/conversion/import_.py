"""`meshwright import`: weights of a Hugging Face folder or a checkpoint of torch as a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.cli.result_command import print_result, result_command


@result_command
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("run_folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--config", type=click.Path(path_type=Path), help="A config.json, or its folder, if not that in SOURCE.")
@click.option("--job", type=click.Path(path_type=Path), help="Job of a class of your own that the weights are for.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Processes that share the work; default: 1.")
@click.option("--overwrite", is_flag=True, help="Replace RUN_FOLDER if it is an import that was not trained.")
def command(
    source: Path,
    run_folder: Path,
    config: Path | None,
    job: Path | None,
    ranks: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the weights of SOURCE, bit by bit, as checkpoint step-0 of the new run RUN_FOLDER.

    SOURCE is a Hugging Face folder or the id of a model of the Hugging Face Hub that was downloaded to this machine. It
    may also be a torch.save file (read with weights_only) or a torch.distributed.checkpoint folder, with the names of
    Hugging Face, of Meta's Llama and torchtitan, or of Meshwright; --config names its config.json.

    Weights in block-fp8 become bfloat16. Tensors are read and written one after the other, so memory does not grow with
    the model. Every tensor of SOURCE is mapped, or dropped and named, or an error.

    Started by torchrun, all of its ranks share the work, on one machine or several.

    A class of your own, named by --job, maps the tensors by its attribute hugging_face (docs/how_to/own_model.md).

    Training from them needs no import: set model.source to the folder's config.json and model.initial_weights to
    SOURCE.
    """
    from meshwright.checkpoint.format.find_checkpoint import config_file

    # Before torch is imported, which takes seconds.
    is_hf = not (source.is_file() or (source / ".metadata").is_file())
    if is_hf:
        config_file(config or source)
    from meshwright.app.conversion.conversion_ranks import is_under_torchrun, preemptible, share_under_torchrun
    from meshwright.app.conversion.import_weights import Import, import_arguments, import_result, import_weights
    from meshwright.checkpoint.hf.import_ import import_folder

    options: dict[str, Any] = {"config": config, "job": job, "overwrite": overwrite}
    done: Import
    with preemptible(run_folder):
        if is_under_torchrun():
            imported = share_under_torchrun(import_folder, import_arguments(source, run_folder, **options), ranks)
            if imported is None:  # rank 0 says it
                return
            done = import_result(source, imported)
        else:
            done = import_weights(source, run_folder, ranks=ranks, **options)
    print_result(done, as_json)
