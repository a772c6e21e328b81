"""`meshwright import`: a Hugging Face folder as a run."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.cli.result_command import print_json, result_command


@result_command
@click.argument("hf_folder", metavar="HF_FOLDER", type=click.Path(path_type=Path))
@click.argument("run_folder", metavar="RUN_FOLDER", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="Replace RUN_FOLDER if it is an import that was not trained.")
def command(hf_folder: Path, run_folder: Path, overwrite: bool, as_json: bool) -> None:
    """Write the weights of HF_FOLDER, bit by bit, as checkpoint step-0 of the new run RUN_FOLDER.

    Weights in block-fp8 become bfloat16. Tensors are read and written one after the other, so memory does not grow with
    the model. Every tensor of HF_FOLDER is mapped, or dropped and named, or an error.

    HF_FOLDER may also be the id of a model of the Hugging Face Hub that was downloaded to this machine.

    Training from them needs no import: set model.source to the folder's config.json and model.initial_weights to
    HF_FOLDER.
    """
    from meshwright.checkpoint.find_checkpoint import model_folder
    from meshwright.units import counted, first_of, format_count

    # Before torch is imported, which takes seconds.
    model_folder(hf_folder)
    from meshwright.checkpoint.hf.import_ import import_folder

    done = import_folder(hf_folder, run_folder, overwrite=overwrite)
    if as_json:
        checkpoint = str(done.run.checkpoint(0))
        result = {"checkpoint": checkpoint, "num_parameters": done.num_parameters, "dtypes": done.dtypes}
        print_json({**result, "dropped": done.dropped})
        return
    click.echo(
        f"{hf_folder} -> {done.run.checkpoint(0)}: {format_count(done.num_parameters)} parameters "
        f"in {' and '.join(done.dtypes)}"
    )
    for reason, names in done.dropped.items():
        click.echo(f"dropped {counted(len(names), 'tensor')} ({first_of(names, 2)}): {reason}")
    click.echo(f"next: meshwright generate {run_folder}, or train from it: meshwright train {done.run.job} run.dir=NEW")
